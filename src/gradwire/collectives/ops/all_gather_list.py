"""all_gather into a tensor for each rank; backward concatenates their cotangents."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.autograd import Function
from torch.distributed import ProcessGroup

from gradwire.collectives import wire
from gradwire.collectives.args.ranks import dense_tensor, member
from gradwire.collectives.args.sizes import Sizes
from gradwire.collectives.autograd.handles import Handle, after, run
from gradwire.collectives.autograd.linear import (
    compiling,
    eager_apply,
    graph_is_needed,
    is_transformed,
    linear,
)
from gradwire.collectives.autograd.unstack import concat, unstack
from gradwire.collectives.checks.consistency import CheckContext, check_backward
from gradwire.collectives.ops.all_gather_reduce_scatter import AllGather, checked_gather
from gradwire.errors import ArgumentError

__all__ = ["all_gather_list"]


class _GatherList(Function):
    @staticmethod
    def forward(x: Tensor, op: AllGather, context: CheckContext | None) -> tuple[Tensor, ...]:
        return wire.all_gather_list(x, op.sizes, op.group)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, ctx.op, ctx.check = inputs
        ctx.scalars = not x.dim()

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        cotangent = torch.stack(cotangents) if ctx.scalars else concat(cotangents)
        with check_backward(ctx.check, cotangent):
            gradient = linear(ctx.op.adjoint(), cotangent, ctx.check)
        return gradient.reshape(()) if ctx.scalars else gradient, None, None


_apply_list = eager_apply(_GatherList)


@overload
def all_gather_list(
    x: Tensor,
    *,
    sizes: Sizes = ...,
    group: ProcessGroup | None = ...,
    async_op: Literal[False] = ...,
    check: bool | None = ...,
) -> tuple[Tensor, ...]: ...
@overload
def all_gather_list(
    x: Tensor,
    *,
    sizes: Sizes = ...,
    group: ProcessGroup | None = ...,
    async_op: Literal[True],
    check: bool | None = ...,
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
    dense_tensor(x)
    group = member(group)
    front = x if x.dim() else x.reshape(1)
    detail = "list" if x.dim() else "list of 0-d tensors"

    def start(op: AllGather, front: Tensor, context: CheckContext | None) -> Any:
        if not x.dim():
            op = _of_scalars(op)
        if async_op or compiling(x) or is_transformed():
            cut = op.sizes or (front.shape[0],) * group.size()
            return after(run(op, front, context, async_op), lambda y: unstack(y, cut, not x.dim()))
        own = front if x.dim() else front.reshape(())
        if graph_is_needed(own):
            return _apply_list(own, op, context)
        return wire.all_gather_list(own, op.sizes, group)

    return checked_gather(front, sizes, detail, group, check, start)


def _of_scalars(op: AllGather) -> AllGather:
    """The op for 0-d tensors, of which each rank has one."""
    if op.sizes is not None and set(op.sizes) != {1}:
        raise ArgumentError(f"sizes is {list(op.sizes)}: x is 0-d, and counts as one of size 1")
    return AllGather(op.group)
