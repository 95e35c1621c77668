"""Reduction ops: their names, and for which tensors they are defined."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.collectives.args.validation import check_dense
from gradwire.collectives.wire import reduce_locally
from gradwire.collectives.wire.reductions import Reduction, check_computable
from gradwire.errors import ArgumentError, ArgumentTypeError


@dataclass(frozen=True)
class Premul:
    """The reduction Σ c·x, where each rank has a factor c of its own.

    Args:
        factor: A number, or a tensor; its product with x has the shape and the dtype of x.
            Differentiable.

    Example:
        >>> from gradwire.collectives import Premul, all_reduce
        >>> def main():
        ...     return all_reduce(torch.ones(1), Premul(10.0**dist.get_rank()))
        >>> run_ranks(main, world_size=2)  # 1 + 10
        [tensor([11.]), tensor([11.])]
    """

    factor: float | Tensor


Op = str | Premul | dist.ReduceOp | dist.ReduceOp.RedOpType
"""A name, one of torch.distributed's, or a `Premul`."""

_NAMES = ("sum", "avg", "max", "min", "product", "band", "bor", "bxor")
BITWISE = ("band", "bor", "bxor")


def reducible(x: Tensor, op: object) -> tuple[Tensor, str]:
    """The tensor to reduce, which for a `Premul` is the product, and the reduction's name.

    Raises:
        ArgumentError, ArgumentTypeError: Not a reduction, or not one for such a tensor.
    """
    reduction = _as_reduction(op)
    check_reducible(x, reduction)
    return _premultiplied(x, reduction) if isinstance(reduction, Premul) else (x, reduction)


def _as_reduction(op: object) -> str | Premul:
    """The reduction's name, or the `Premul` itself.

    Raises:
        ArgumentError, ArgumentTypeError: Not a reduction.
    """
    if isinstance(op, Premul):
        return op
    if isinstance(op, str):
        name = op.lower()
    elif isinstance(op, dist.ReduceOp | dist.ReduceOp.RedOpType):
        # A RedOpType says that it is an instance of ReduceOp too.
        kind: Any = op if isinstance(op, dist.ReduceOp.RedOpType) else op.op  # type: ignore[attr-defined]
        name = kind.name.lower()
    else:
        raise ArgumentTypeError(f"op is {op!r}: give one of {', '.join(_NAMES)}, or a Premul")
    if name not in _NAMES:
        raise ArgumentError(f"op is {op!r}: give one of {', '.join(_NAMES)}, or a Premul")
    return name


def check_reducible(x: Tensor, op: str | Premul, reduction: Reduction = reduce_locally) -> None:
    """Raise if the op is not defined for the tensor's dtype, or PyTorch cannot compute it.

    Args:
        x: The tensor.
        op: The op, as `_as_reduction` gives it.
        reduction: What computes it, from all ranks' pieces, stacked, and the op's name.

    Raises:
        ArgumentError: It is not, or PyTorch cannot.
    """
    check_dense(x)
    real_or_complex = x.is_floating_point() or x.is_complex()
    if op in BITWISE and real_or_complex:
        raise ArgumentError(f"op is {op}, tensor is {x.dtype}: it takes integers and booleans")
    if op in ("max", "min") and x.is_complex():
        raise ArgumentError(f"op is {op}, tensor is {x.dtype}: complex numbers have no order")
    if op == "avg" and not real_or_complex:
        raise ArgumentError(f"op is avg, tensor is {x.dtype}: it takes floating-point numbers")
    if op == "avg" and x.dtype == torch.complex32:
        raise ArgumentError(f"op is avg, tensor is {x.dtype}: convert the tensor to complex64")
    if x.dtype == torch.bool and op not in ("band", "bor", "bxor", "max", "min"):
        raise ArgumentError(f"op is {op}, tensor is torch.bool: give band, bor, bxor, max or min")
    check_computable(x, "sum" if isinstance(op, Premul) else op, reduction)


def _premultiplied(x: Tensor, op: Premul) -> tuple[Tensor, str]:
    """The product, made before ranks compare their calls: the factor may require a gradient too.

    Raises:
        ArgumentTypeError: The factor is not a number or a tensor.
        ArgumentError: It changes the shape or the dtype, and then perhaps on this rank only.
    """
    if not isinstance(op.factor, Tensor | int | float | complex):
        raise ArgumentTypeError(f"factor is {op.factor!r}: give a number or a tensor")
    y = x * op.factor
    if y.shape != x.shape or y.dtype != x.dtype:
        raise ArgumentError(
            f"factor times x is {y.dtype} of shape {tuple(y.shape)}, and x is {x.dtype} of shape "
            f"{tuple(x.shape)}: give a factor that leaves both as they are"
        )
    return y, "premul"
