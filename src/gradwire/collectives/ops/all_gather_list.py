"""all_gather into a tensor for each rank; backward concatenates their cotangents."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor
from torch.autograd import Function
from torch.distributed import ProcessGroup

from gradwire.collectives import wire
from gradwire.collectives.args.options import Async, Sync
from gradwire.collectives.args.ranks import resolve_group
from gradwire.collectives.args.sizes import KnownSizes, Sizes
from gradwire.collectives.args.tensors import check_dense
from gradwire.collectives.autograd.handles import Handle, apply_or_start, then
from gradwire.collectives.autograd.linear_collective import (
    apply_linear,
    compiling,
    eager_apply,
    graph_is_needed,
    is_transformed,
)
from gradwire.collectives.autograd.unstack import concat, unstack
from gradwire.collectives.checks.consistency import CheckContext
from gradwire.collectives.ops.all_gather_reduce_scatter import checked_gather
from gradwire.collectives.ops.plans import AllGather
from gradwire.errors import ArgumentError

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["all_gather_list"]


class _GatherList(Function):
    @staticmethod
    def forward(x: Tensor, plan: AllGather, context: CheckContext) -> tuple[Tensor, ...]:
        return wire.all_gather_list(x, plan.sizes, plan.group)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, ctx.plan, ctx.check = inputs
        ctx.scalars = not x.dim()

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        cotangent = torch.stack(cotangents) if ctx.scalars else concat(cotangents)
        with ctx.check.backward(cotangent):
            gradient = apply_linear(ctx.plan.adjoint(), cotangent, ctx.check)
        return gradient.reshape(()) if ctx.scalars else gradient, None, None


_apply_list = eager_apply(_GatherList)


@overload
def all_gather_list(
    x: Tensor, *, sizes: Sizes = ..., **options: Unpack[Sync]
) -> tuple[Tensor, ...]: ...
@overload
def all_gather_list(
    x: Tensor, *, sizes: Sizes = ..., **options: Unpack[Async]
) -> Handle[tuple[Tensor, ...]]: ...
def all_gather_list(
    x: Tensor,
    *,
    sizes: Sizes = None,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    check: bool | None = None,
) -> Any:
    """All ranks' tensors, on all ranks, each in a tensor of its own.

    Args:
        x: The same shape on all ranks but for the first dim where sizes are given; any dtype. A
            0-d tensor counts as one of size 1, and gives 0-d tensors.
        sizes: As in `all_gather`, along the first dim.
        group: The default group, if None.
        async_op: Return a `Handle`.
        check: Compare with the other ranks first; see `checks`.

    Returns:
        A tuple of the ranks' tensors, in rank order.

    Adjoint: rank r gets the sum of all ranks' cotangents of entry r.

    Raises:
        ArgumentError: Sizes that are not the ranks'.
        MismatchError: With checks on, ranks disagree.

    Example:
        >>> from gradwire.collectives import all_gather_list
        >>> def main():
        ...     return all_gather_list(torch.tensor(dist.get_rank() + 1.0))
        >>> run_ranks(main, world_size=2)
        [(tensor(1.), tensor(2.)), (tensor(1.), tensor(2.))]
    """
    check_dense(x)
    group = resolve_group(group)
    scalars = not x.dim()
    front = x.reshape(1) if scalars else x
    detail = "list of 0-d tensors" if scalars else "list"

    def start(known: KnownSizes, front: Tensor, context: CheckContext) -> Any:
        if scalars and known is not None:
            if set(known) != {1}:
                raise ArgumentError(
                    f"sizes is {list(known)}: x is 0-d, and counts as one of size 1"
                )
            known = None
        plan = AllGather(group, known)
        if async_op or compiling(x) or is_transformed():
            rows = known or (front.shape[0],) * group.size()
            gathered = apply_or_start(plan, front, context, async_op)
            return then(gathered, lambda y: unstack(y, rows, scalars))
        own = front.reshape(()) if scalars else front
        if graph_is_needed(own):
            return _apply_list(own, plan, context)
        return wire.all_gather_list(own, known, group)

    return checked_gather("all_gather", front, sizes, detail, group, check, start)
