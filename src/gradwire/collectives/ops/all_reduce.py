"""all_reduce, which is its own adjoint, and the pair of operations of tensor parallelism.

The objective is the sum over ranks of the ranks' losses. Under this convention, the adjoint of a
sum over ranks is the sum of the cotangents. A value that is equal on all ranks, and used in the
same way on each, already has its full cotangent on every rank. `vary` converts from such values,
and `all_reduce(..., invariant=True)` converts to them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from gradwire.collectives import consistency, wire
from gradwire.collectives.arguments import check_dense, resolve_group
from gradwire.collectives.consistency import tensor_fields
from gradwire.collectives.handles import Async, Handle, Sync
from gradwire.collectives.linear_collective import LinearCollective, divided, register_plan
from gradwire.collectives.operation import Operation, Plan
from gradwire.collectives.ops.reductions import AllReduce, reduce_with
from gradwire.collectives.reduce_ops import Op, reduction_of
from gradwire.collectives.signature import CallSignature
from gradwire.errors import ArgumentError

if TYPE_CHECKING:
    from typing_extensions import Unpack


@register_plan
@dataclass(frozen=True)
class Invariant(LinearCollective):
    """Sum or average that all ranks use in the same way, so that backward sends nothing."""

    average: bool = False
    name = "psum_invariant"

    def start(self, x: Tensor, blocking: bool = False) -> wire.Pending:
        return wire.all_reduce(x, "avg" if self.average else "sum", self.group, blocking)

    def adjoint(self) -> Vary:
        return Vary(self.group, self.average)


@register_plan
@dataclass(frozen=True)
class Vary(LinearCollective):
    """Identity on a value that is equal on all ranks, and used differently on each."""

    average: bool = False
    name = "vary"

    def start(self, x: Tensor, blocking: bool = False) -> wire.Pending:
        return divided(self, wire.done(wire.contiguous_copy(x)))

    def adjoint(self) -> Invariant:
        return Invariant(self.group, self.average)


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
    """Reduce the tensors of all ranks, on every rank.

    Args:
        x: Tensor of the same shape on all ranks, with any strides. Floating-point and complex
            dtypes are differentiable; integers and booleans can be reduced too.
        op: "sum", "avg", "max", "min", "product", "band", "bor", "bxor", torch.distributed's
            ReduceOp of that name. NaN propagates.
        group: Process group; the default group if None.
        invariant: True if every rank uses the result in the same way, so that each already has the
            full cotangent. Backward then sends nothing. For sum and avg only.
        async_op: True to return a `Handle`.
        check: True to compare the call with the other ranks first; see `checks`.

    Returns:
        The reduction: same shape and dtype as `x`, the same bits on all ranks.

    Adjoint: for sum and avg, the same reduction of the cotangents. For max and min, the summed
    cotangent, shared equally by the ranks that tie. For product, the summed cotangent times the
    (conjugate) product of the other ranks' values.

    Raises:
        ArgumentError: The op is not defined for the dtype, or this rank is not in the group.
        MismatchError: With checks on, the ranks disagree.

    Example:
        The objective is the sum of the ranks' losses, so the cotangents of both ranks are summed.

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
    reduction = reduction_of(x, op)
    if invariant and reduction not in ("sum", "avg"):
        raise ArgumentError(f"invariant=True with op={op!r}: use it with sum or avg only")
    average = reduction == "avg"
    plan: Plan
    if invariant:
        plan = Invariant(group, average)
    else:
        plan = reduce_with(reduction, AllReduce(group, average))
    detail = "invariant" if invariant else ""
    operation = Operation(
        x,
        group,
        lambda: CallSignature("all_reduce", *tensor_fields(x), reduce=reduction, detail=detail),
        lambda x, peers: plan,
    )
    return operation.run(check, async_op)


def vary(x: Tensor, *, group: ProcessGroup | None = None, check: bool | None = None) -> Tensor:
    """Copy a value that is equal on all ranks, to be used differently by each.

    In tensor parallelism, call this before the column-parallel layer, and
    `all_reduce(..., invariant=True)` after the row-parallel one.

    Args:
        x: Tensor with the same values on all ranks. Floating-point or complex.
        group: Process group; the default group if None.
        check: True to compare backward with the other ranks; see `checks`.

    Adjoint: the sum of the ranks' cotangents, on every rank.

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
        x, context, _ = consistency.agree(group, x, CallSignature("vary", *tensor_fields(x)))
    return Vary(group).apply(x, context)


def invariant(x: Tensor, *, group: ProcessGroup | None = None, check: bool | None = None) -> Tensor:
    """Assert that a value is equal on all ranks, and used in the same way; return a copy of it.

    Nothing is sent in either pass. With checks on, the ranks verify the assertion by comparing a
    hash of the values.

    Args:
        x: Tensor with the same values on all ranks, of any dtype.
        group: Process group; the default group if None.
        check: True to verify the assertion; see `checks`.

    Adjoint: the identity. Every rank's cotangent is taken to be the full one.

    Raises:
        MismatchError: With checks on, the values differ.
    """
    group = resolve_group(group)
    check_dense(x)
    if consistency.enabled(check):
        consistency.agree(
            group,
            x,
            CallSignature("invariant", *tensor_fields(x), detail=consistency.digest(x)),
        )
    return x.clone(memory_format=torch.contiguous_format)
