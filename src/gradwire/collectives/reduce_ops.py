"""Reduction ops: names, and the dtypes for which each is defined."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.collectives import wire
from gradwire.collectives.arguments import check_dense
from gradwire.errors import ArgumentError, ArgumentTypeError

Op = str | dist.ReduceOp | dist.ReduceOp.RedOpType
"""Name of a reduction, or torch.distributed's ReduceOp."""

_NAMES = ("sum", "avg", "max", "min", "product", "band", "bor", "bxor")
BITWISE = ("band", "bor", "bxor")


def reduction_of(x: Tensor, op: object) -> str:
    """Return the reduction's name.

    Raises:
        ArgumentError, ArgumentTypeError: `op` is not a reduction, or not defined for the dtype.
    """
    if isinstance(op, str):
        name = op.lower()
    elif isinstance(op, dist.ReduceOp | dist.ReduceOp.RedOpType):
        # isinstance(RedOpType, ReduceOp) is also True.
        kind: Any = op if isinstance(op, dist.ReduceOp.RedOpType) else op.op  # type: ignore[attr-defined]
        name = kind.name.lower()
    else:
        raise ArgumentTypeError(f"op is {op!r}: give one of {', '.join(_NAMES)}")
    if name not in _NAMES:
        raise ArgumentError(f"op is {op!r}: give one of {', '.join(_NAMES)}")
    check_reducible(x, name)
    return name


def check_reducible(x: Tensor, op: str) -> None:
    """Raise if the op is not defined for the tensor's dtype, or PyTorch cannot compute it.

    Raises:
        ArgumentError: The op is not defined, or PyTorch cannot compute it.
    """
    check_dense(x)
    real_or_complex = x.is_floating_point() or x.is_complex()
    if op in BITWISE and real_or_complex:
        raise ArgumentError(f"op is {op}, tensor is {x.dtype}: give integers or booleans")
    if op in ("max", "min") and x.is_complex():
        raise ArgumentError(f"op is {op}, tensor is {x.dtype}: complex numbers are not ordered")
    if op == "avg" and not real_or_complex:
        raise ArgumentError(f"op is avg, tensor is {x.dtype}: give floating-point numbers")
    if op == "avg" and x.dtype == torch.complex32:
        raise ArgumentError(f"op is avg, tensor is {x.dtype}: convert the tensor to complex64")
    if x.dtype == torch.bool and op not in ("band", "bor", "bxor", "max", "min"):
        raise ArgumentError(f"op is {op}, tensor is torch.bool: give band, bor, bxor, max or min")
    wire.check_computable(x, op)
