"""all_reduce, its own adjoint; and the pair that tensor parallelism is made of.

Under the convention that the objective is the sum over ranks of the ranks' losses, the adjoint of
a sum over ranks is the sum of the cotangents. A value that is the same on all ranks, and used in
the same way, has its full cotangent on each rank already: `vary` and
`all_reduce(..., invariant=True)` are the way from and to such values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from gradwire.collectives.args.reductions import Op, reducible
from gradwire.collectives.args.validation import check_dense, resolve_group
from gradwire.collectives.autograd.handles import Async, Handle, Sync, apply_or_start
from gradwire.collectives.autograd.linear_collective import apply_linear
from gradwire.collectives.checks import consistency
from gradwire.collectives.checks.call_signature import CallSignature
from gradwire.collectives.checks.consistency import CheckContext
from gradwire.collectives.ops.checked import run_checked
from gradwire.collectives.ops.nonlinear import apply_reduction
from gradwire.collectives.ops.plans import AllReduce, Invariant, Vary
from gradwire.errors import ArgumentError

if TYPE_CHECKING:
    from typing_extensions import Unpack


@overload
def all_reduce(
    x: Tensor, op: Op = ..., *, invariant: bool = ..., **options: Unpack[Sync]
) -> Tensor: ...
@overload
def all_reduce(
    x: Tensor, op: Op = ..., *, invariant: bool = ..., **options: Unpack[Async]
) -> Handle[Tensor]: ...
def all_reduce(
    x: Tensor,
    op: Op = "sum",
    *,
    group: ProcessGroup | None = None,
    invariant: bool = False,
    async_op: bool = False,
    check: bool | None = None,
) -> Any:
    """The reduction of all ranks' tensors, on all ranks.

    Args:
        x: Any shape, the same on all ranks, any strides. Floating-point and complex dtypes are
            differentiable; integers and booleans are reduced too.
        op: "sum", "avg", "max", "min", "product", "band", "bor", "bxor", torch.distributed's
            ReduceOp of that name, or a `Premul`. NaN propagates.
        group: The default group, if None.
        invariant: For sum and avg: every rank uses the result in the same way, so that each
            has the full cotangent already; backward then sends nothing.
        async_op: Return a `Handle`.
        check: Compare with the other ranks first; see `checks`.

    Returns:
        The same shape, dtype and bits on all ranks.

    Adjoint: sum, avg: the same of the cotangents. max, min: the summed cotangent, shared equally
    by the ranks that tie. product: the summed cotangent times the (conjugate) product of the
    other ranks' values. Premul: the factor times the summed cotangent.

    Raises:
        ArgumentError: The op is not defined for the dtype, or this rank is outside the group.
        MismatchError: With checks on, ranks disagree.

    Example:
        The objective is the sum of the ranks' losses, so each cotangent of ones counts.

        >>> from gradwire.collectives import all_reduce
        >>> def main():
        ...     x = torch.tensor([dist.get_rank() + 1.0], requires_grad=True)  # [1.], [2.]
        ...     y = all_reduce(x)  # [3.], [3.]
        ...     y.sum().backward()
        ...     return y.item(), x.grad.item()
        >>> run_ranks(main, world_size=2)
        [(3.0, 2.0), (3.0, 2.0)]
    """
    group = resolve_group(group)
    x, reduction = reducible(x, op)
    if invariant and reduction not in ("sum", "avg"):
        raise ArgumentError(f"invariant=True with op={op!r}: it goes with sum and avg")

    average = reduction == "avg"

    def start(x: Tensor, context: CheckContext) -> Any:
        if invariant:
            return apply_or_start(Invariant(group, average), x, context, async_op)
        return apply_reduction(AllReduce(group, average), x, reduction, context, async_op)

    return run_checked(
        group,
        x,
        check,
        lambda: CallSignature(
            "all_reduce",
            *consistency.tensor_fields(x),
            reduce=reduction,
            detail="invariant" if invariant else "",
        ),
        start,
    )


def vary(x: Tensor, *, group: ProcessGroup | None = None, check: bool | None = None) -> Tensor:
    """A value that is the same on all ranks, from here on used differently by each: a copy.

    In tensor parallelism this stands before the column-parallel layer, and
    `all_reduce(..., invariant=True)` after the row-parallel one.

    Args:
        x: The same on all ranks. Floating-point or complex.
        group: The default group, if None.
        check: Compare backward with the other ranks; see `checks`.

    Adjoint: the sum of the ranks' cotangents, on all ranks.

    Example:
        >>> from gradwire.collectives import vary
        >>> def main():
        ...     x = torch.ones(1, requires_grad=True)
        ...     (vary(x) * (dist.get_rank() + 1)).sum().backward()
        ...     return x.grad  # 1 + 2
        >>> run_ranks(main, world_size=2)
        [tensor([3.]), tensor([3.])]
    """
    group = resolve_group(group)
    check_dense(x)
    context = consistency.UNCHECKED
    if consistency.enabled(check):
        x, context, _ = consistency.agree(
            group, x, CallSignature("vary", *consistency.tensor_fields(x))
        )
    return apply_linear(Vary(group), x, context)


def invariant(x: Tensor, *, group: ProcessGroup | None = None, check: bool | None = None) -> Tensor:
    """A value that is the same, and used in the same way, on all ranks: the tensor, as a statement.

    Nothing is sent in either pass. With checks on, the ranks compare a digest of the values, so
    that the statement is verified.

    Args:
        x: The same on all ranks, any dtype.
        group: The default group, if None.
        check: Verify it; see `checks`.

    Adjoint: the identity. The cotangent is taken to be the full one on every rank.

    Raises:
        MismatchError: With checks on, the ranks' values differ.
    """
    group = resolve_group(group)
    check_dense(x)
    if consistency.enabled(check):
        consistency.agree(
            group,
            x,
            CallSignature("invariant", *consistency.tensor_fields(x), detail=consistency.digest(x)),
        )
    return x.clone(memory_format=torch.contiguous_format)
