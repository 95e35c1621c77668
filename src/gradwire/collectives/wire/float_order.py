"""Maximum and minimum of floating-point numbers as integers, so that NaN propagates.

Gloo and MPI compare as C does, where NaN loses or wins by its position. The bits of an IEEE number,
seen as an integer, are ordered as the number is, once those of negative numbers are flipped; NaN is
given the integer that wins. The message has the same size and needs no second one.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["decode", "encode"]

_INTEGERS = {torch.float32: torch.int32, torch.float64: torch.int64}


def encode(x: Tensor, op: str) -> Tensor:
    """Integers whose maximum (minimum) stands for that of `x`: a fresh, contiguous tensor."""
    wide = x if x.dtype in _INTEGERS else x.float()
    integer = _INTEGERS[wide.dtype]
    limits = torch.iinfo(integer)
    keys = _flipped(wide.contiguous().resolve_neg().view(integer))
    return keys.masked_fill_(wide.isnan(), limits.max if op == "max" else limits.min)


def decode(keys: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers that integers of `encode` stand for."""
    wide = torch.float64 if keys.dtype == torch.int64 else torch.float32
    return _flipped(keys).view(wide).to(dtype)


def _flipped(bits: Tensor) -> Tensor:
    """All bits but the sign's, inverted where the sign is set; its own inverse."""
    limits = torch.iinfo(bits.dtype)
    return (bits >> (limits.bits - 1)).bitwise_and_(limits.max).bitwise_xor_(bits)
