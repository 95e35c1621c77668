"""all_gather and reduce_scatter: each is the other's adjoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Unpack, overload

import torch
from torch import Tensor
from torch.autograd import Function
from torch.distributed import ProcessGroup

from gradwire.collectives import wire
from gradwire.collectives.all_reduce_vary import ReductionCollective, reduce_with
from gradwire.collectives.backends import Pending
from gradwire.collectives.consistency import (
    CallSignature,
    CheckContext,
    gather_signature,
    tensor_fields,
)
from gradwire.collectives.operation import (
    Async,
    Handle,
    LinearCollective,
    Operation,
    Peers,
    Sync,
    compiling,
    concat,
    divided,
    eager_apply,
    graph_is_needed,
    is_transformed,
    register_plan,
    unstack,
)
from gradwire.collectives.validation import (
    Op,
    Sizes,
    check_dense,
    move_back,
    move_to_front,
    piece_sizes,
    pieces_of,
    reduction_of,
    resolve_group,
    resolve_sizes,
    sizes_of_split,
)
from gradwire.errors import ArgumentError


@register_plan
@dataclass(frozen=True)
class AllGather(LinearCollective):
    """Concatenation of all ranks' rows, on every rank."""

    sizes: tuple[int, ...] | None = None
    average: bool = False
    name = "all_gather"

    def start(self, x: Tensor, blocking: bool = False) -> Pending:
        return divided(self, wire.all_gather(x, self.sizes, self.group, blocking))

    def adjoint(self) -> ReduceScatter:
        return ReduceScatter(self.group, self.sizes, self.average)

    def rows(self, rows: int) -> int:
        return rows * self.group.size() if self.sizes is None else sum(self.sizes)


@register_plan
@dataclass(frozen=True)
class ReduceScatter(ReductionCollective):
    """Sum or average over ranks, scattered by rows."""

    sizes: tuple[int, ...] | None = None
    average: bool = False
    name = "reduce_scatter"

    def start_reduction(self, x: Tensor, op: str, blocking: bool = False) -> Pending:
        return wire.reduce_scatter(x, self.sizes, op, self.group, blocking)

    def adjoint(self) -> AllGather:
        return AllGather(self.group, self.sizes, self.average)

    def rows(self, rows: int) -> int:
        return rows // self.group.size() if self.sizes is None else self.sizes[self.group.rank()]


@overload
def all_gather(
    x: Tensor, dim: int = ..., *, sizes: Sizes = ..., stack: bool = ..., **options: Unpack[Sync]
) -> Tensor: ...
@overload
def all_gather(
    x: Tensor, dim: int = ..., *, sizes: Sizes = ..., stack: bool = ..., **options: Unpack[Async]
) -> Handle[Tensor]: ...
def all_gather(
    x: Tensor,
    dim: int = 0,
    *,
    sizes: Sizes = None,
    stack: bool = False,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    check: bool | None = None,
) -> Any:
    """Concatenate the tensors of all ranks along a dim, on every rank.

    Args:
        x: Tensor of any dtype and strides. Its shape is the same on all ranks, except in `dim` if
            `sizes` is given. A 0-d tensor counts as one of size 1.
        dim: Dim along which to concatenate.
        sizes: Sizes of all ranks in `dim`, the same list on every rank; "find" to exchange them
            first; None if they are equal.
        stack: True to concatenate along a new dim, inserted before `dim`.
        group: Process group; the default group if None.
        async_op: True to return a `Handle`.
        check: True to compare the call with the other ranks first; see `checks`.

    Returns:
        The concatenation in rank order, contiguous.

    Adjoint: reduce_scatter of the cotangents, one collective of the result's size.

    Raises:
        ArgumentError: The sizes are wrong, or the tensor does not have the dim.
        MismatchError: With checks on, the ranks disagree.

    Example:
        >>> from gradwire.collectives import all_gather
        >>> def main():
        ...     rank = dist.get_rank()
        ...     return all_gather(torch.full((rank + 1,), rank), sizes="find")
        >>> run_ranks(main, world_size=2)  # rank 0 has [0], rank 1 has [1, 1]
        [tensor([0, 1, 1]), tensor([0, 1, 1])]
    """
    front, dim = move_to_front(x, dim, stack)
    group = resolve_group(group)

    operation = Operation(
        front,
        group,
        lambda: gather_signature("all_gather", front, sizes, f"dim={dim}"),
        lambda front, peers: AllGather(
            group, None if sizes is None else resolve_sizes(sizes, front.shape[0], group)
        ),
        (lambda _, y: move_back(y, dim)) if dim else None,
    )
    return operation.run(check, async_op)


@overload
def reduce_scatter(
    x: Tensor | Sequence[Tensor],
    op: Op = ...,
    dim: int = ...,
    *,
    sizes: Sequence[int] | None = ...,
    **options: Unpack[Sync],
) -> Tensor: ...
@overload
def reduce_scatter(
    x: Tensor | Sequence[Tensor],
    op: Op = ...,
    dim: int = ...,
    *,
    sizes: Sequence[int] | None = ...,
    **options: Unpack[Async],
) -> Handle[Tensor]: ...
def reduce_scatter(
    x: Tensor | Sequence[Tensor],
    op: Op = "sum",
    dim: int = 0,
    *,
    sizes: Sequence[int] | None = None,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    check: bool | None = None,
) -> Any:
    """Reduce the tensors of all ranks, and scatter the result along a dim.

    Args:
        x: Tensor of the same shape on all ranks, with any strides; or a list of W tensors, whose
            sizes differ in `dim` only.
        op: Reduction, as in `all_reduce`.
        dim: Dim to split.
        sizes: Sizes of the pieces in `dim`; None for equal ones, or for those of a list.
        group: Process group; the default group if None.
        async_op: True to return a `Handle`.
        check: True to compare the call with the other ranks first; see `checks`.

    Returns:
        This rank's piece of the reduction.

    Adjoint: all_gather of the cotangents, then the op's rule as in `all_reduce`.

    Raises:
        ArgumentError: The tensor cannot be split this way, or the op is not defined for the dtype.
        MismatchError: With checks on, the ranks disagree.

    Example:
        >>> from gradwire.collectives import reduce_scatter
        >>> def main():
        ...     return reduce_scatter(torch.tensor([1.0, 2.0]) * (dist.get_rank() + 1))
        >>> run_ranks(main, world_size=2)  # of [1, 2] + [2, 4]
        [tensor([3.]), tensor([6.])]
    """
    group = resolve_group(group)
    scalars = False
    if not isinstance(x, Tensor):
        pieces, dim, scalars = pieces_of(x, dim, group, "x")
        sizes = piece_sizes(pieces, dim, sizes, group)
        x = concat(pieces, dim)
    reduction = reduction_of(x, op)
    front, dim = move_to_front(x, dim)
    split = sizes_of_split(sizes, front, dim, group, names=("sizes", "x"))
    known = None if sizes is None or len(set(split)) == 1 else split
    plan = reduce_with(reduction, ReduceScatter(group, known, reduction == "avg"))
    operation = Operation(
        front,
        group,
        lambda: CallSignature(
            "reduce_scatter",
            *tensor_fields(front),
            reduce=reduction,
            detail=f"dim={dim}, sizes={known}",
        ),
        lambda x, peers: plan,
        lambda _, y: y.reshape(()) if scalars else move_back(y, dim),
    )
    return operation.run(check, async_op)


@dataclass(frozen=True)
class _AllGatherList:
    """Plan of an all_gather whose result is a tensor for each rank.

    Args:
        whole: Plan of the all_gather to one tensor.
        scalars: True if the tensors are 0-d.
    """

    whole: AllGather
    scalars: bool

    def apply(self, x: Tensor, context: CheckContext) -> tuple[Tensor, ...]:
        if compiling(x) or is_transformed():
            return self._unstacked(x, self.whole.apply(x, context))
        own = x.reshape(()) if self.scalars else x
        if graph_is_needed(own):
            pieces: tuple[Tensor, ...] = _apply_list(own, self.whole, context)
            return pieces
        return wire.all_gather_list(own, self.whole.sizes, self.whole.group)

    def apply_async(self, x: Tensor, context: CheckContext) -> Handle[tuple[Tensor, ...]]:
        return self.whole.apply_async(x, context).then(lambda y: self._unstacked(x, y))

    def _unstacked(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        rows = self.whole.sizes or (x.shape[0],) * self.whole.group.size()
        return unstack(y, rows, self.scalars)


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
            gradient = ctx.plan.adjoint().apply(cotangent, ctx.check)
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
    """Gather the tensors of all ranks on every rank, as separate tensors.

    Args:
        x: Tensor of any dtype. Its shape is the same on all ranks, except in the first dim if
            `sizes` is given. A 0-d tensor counts as one of size 1; the results are then 0-d.
        sizes: Sizes in the first dim, as in `all_gather`.
        group: Process group; the default group if None.
        async_op: True to return a `Handle`.
        check: True to compare the call with the other ranks first; see `checks`.

    Returns:
        A tuple of the ranks' tensors, in rank order.

    Adjoint: on rank r, the sum over all ranks of the cotangents of entry r.

    Raises:
        ArgumentError: The sizes are wrong.
        MismatchError: With checks on, the ranks disagree.

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
    kind = "list of 0-d tensors" if scalars else "list"

    def plan(front: Tensor, peers: Peers) -> _AllGatherList:
        known = resolve_sizes(sizes, front.shape[0], group)
        if scalars and known is not None:
            if set(known) != {1}:
                raise ArgumentError(f"sizes is {list(known)}: x is 0-d, which counts as size 1")
            known = None
        return _AllGatherList(AllGather(group, known), scalars)

    operation = Operation(
        front, group, lambda: gather_signature("all_gather", front, sizes, kind), plan
    )
    return operation.run(check, async_op)
