"""Reduction ops: names, and the dtypes for which each is defined."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.collectives import wire
from gradwire.collectives.arguments import check_dense
from gradwire.errors import ArgumentError, ArgumentTypeError


@dataclass(frozen=True)
class Premul:
    """The reduction Σ c·x, in which each rank scales its tensor by its own factor c.

    Args:
        factor: Number or tensor whose product with x has the shape and dtype of x. Differentiable.

    Example:
        >>> from gradwire.collectives import Premul, all_reduce
        >>> def main():
        ...     return all_reduce(torch.ones(1), Premul(10.0**dist.get_rank()))
        >>> run_ranks(main, world_size=2)  # 1 + 10
        [tensor([11.]), tensor([11.])]
    """

    factor: float | Tensor


Op = str | Premul | dist.ReduceOp | dist.ReduceOp.RedOpType
"""Name of a reduction, torch.distributed's ReduceOp, or a `Premul`."""

_NAMES = ("sum", "avg", "max", "min", "product", "band", "bor", "bxor")
BITWISE = ("band", "bor", "bxor")


def reducible(x: Tensor, op: object) -> tuple[Tensor, str]:
    """Return the tensor to reduce and the reduction's name; `Premul` is applied to the tensor.

    Raises:
        ArgumentError, ArgumentTypeError: `op` is not a reduction, or not defined for the dtype.
    """
    reduction = _as_reduction(op)
    check_reducible(x, reduction)
    return _premultiplied(x, reduction) if isinstance(reduction, Premul) else (x, reduction)


def _as_reduction(op: object) -> str | Premul:
    """Return the reduction's name, or the `Premul` itself.

    Raises:
        ArgumentError, ArgumentTypeError: `op` is not a reduction.
    """
    if isinstance(op, Premul):
        return op
    if isinstance(op, str):
        name = op.lower()
    elif isinstance(op, dist.ReduceOp | dist.ReduceOp.RedOpType):
        # isinstance(RedOpType, ReduceOp) is also True.
        kind: Any = op if isinstance(op, dist.ReduceOp.RedOpType) else op.op  # type: ignore[attr-defined]
        name = kind.name.lower()
    else:
        raise ArgumentTypeError(f"op is {op!r}: give one of {', '.join(_NAMES)}, or a Premul")
    if name not in _NAMES:
        raise ArgumentError(f"op is {op!r}: give one of {', '.join(_NAMES)}, or a Premul")
    return name


def check_reducible(
    x: Tensor, op: str | Premul, reduction: wire.Reduction = wire.reduce_locally
) -> None:
    """Raise if the op is not defined for the tensor's dtype, or PyTorch cannot compute it.

    Args:
        x: Tensor to reduce.
        op: Op as returned by `_as_reduction`.
        reduction: Function that reduces the ranks' stacked tensors, given the op's name.

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
    wire.check_computable(x, "sum" if isinstance(op, Premul) else op, reduction)


def _premultiplied(x: Tensor, op: Premul) -> tuple[Tensor, str]:
    """Return the tensor times the factor.

    The product is computed before ranks compare their calls: the factor may require a gradient too.

    Raises:
        ArgumentTypeError: The factor is not a number or a tensor.
        ArgumentError: The factor changes the shape or the dtype, perhaps on this rank only.
    """
    if not isinstance(op.factor, Tensor | int | float | complex):
        raise ArgumentTypeError(f"factor is {op.factor!r}: give a number or a tensor")
    y = x * op.factor
    if y.shape != x.shape or y.dtype != x.dtype:
        raise ArgumentError(
            f"factor times x is {y.dtype} of shape {tuple(y.shape)}, and x is {x.dtype} of shape "
            f"{tuple(x.shape)}: give a factor that keeps both"
        )
    return y, "premul"
