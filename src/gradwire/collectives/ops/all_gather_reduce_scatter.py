"""all_gather and reduce_scatter: each is the other's adjoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor
from torch.autograd import Function
from torch.distributed import ProcessGroup

from gradwire.collectives import wire
from gradwire.collectives.args.reductions import Op, reducible
from gradwire.collectives.args.sizes import (
    KnownSizes,
    Sizes,
    move_back,
    move_to_front,
    piece_sizes,
    pieces_of,
    resolve_sizes,
    sizes_of_split,
    sizes_text,
)
from gradwire.collectives.args.validation import check_dense, resolve_group
from gradwire.collectives.autograd.handles import Async, Handle, Sync, apply_or_start, then
from gradwire.collectives.autograd.linear_collective import (
    apply_linear,
    compiling,
    eager_apply,
    graph_is_needed,
    is_transformed,
)
from gradwire.collectives.autograd.unstack import concat, unstack
from gradwire.collectives.checks import consistency
from gradwire.collectives.checks.call_signature import CallSignature
from gradwire.collectives.checks.consistency import CheckContext
from gradwire.collectives.ops.checked import run_checked
from gradwire.collectives.ops.nonlinear import apply_reduction
from gradwire.collectives.ops.plans import AllGather, ReduceScatter
from gradwire.errors import ArgumentError

if TYPE_CHECKING:
    from typing_extensions import Unpack


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
    """All ranks' tensors concatenated along a dim, on all ranks.

    Args:
        x: The same shape on all ranks but for `dim` where sizes are given; any dtype and strides.
            A 0-d tensor counts as one of size 1.
        dim: The dim along which they are concatenated.
        sizes: The ranks' sizes in `dim`, the same list on all; "find" to have them exchanged
            first; None if all are equal.
        stack: Concatenate along a new dim instead, before `dim`.
        group: The default group, if None.
        async_op: Return a `Handle`.
        check: Compare with the other ranks first; see `checks`.

    Returns:
        The concatenation in rank order, contiguous.

    Adjoint: reduce_scatter of the cotangents: one collective of the result's size.

    Raises:
        ArgumentError: Sizes that are not the ranks', or no such dim.
        MismatchError: With checks on, ranks disagree.

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

    def start(known: KnownSizes, front: Tensor, context: CheckContext) -> Any:
        return apply_or_start(AllGather(group, known), front, context, async_op)

    gathered = checked_gather("all_gather", front, sizes, f"dim={dim}", group, check, start)
    return then(gathered, lambda y: move_back(y, dim))


def checked_gather(
    op: str,
    front: Tensor,
    sizes: Sizes,
    detail: str,
    group: ProcessGroup,
    check: bool | None,
    gather: Callable[[KnownSizes, Tensor, CheckContext], Any],
    root: int = -1,
) -> Any:
    """The result of `gather`, called with the ranks' sizes once ranks agree on the call."""

    def describe() -> CallSignature:
        text, ragged = f"{detail}, {sizes_text(sizes)}", sizes is not None
        return CallSignature(
            op, *consistency.tensor_fields(front), root=root, detail=text, ragged=ragged
        )

    def start(front: Tensor, context: CheckContext) -> Any:
        return gather(resolve_sizes(sizes, front.shape[0], group), front, context)

    return run_checked(group, front, check, describe, start)


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
    """The reduction of all ranks' tensors, split along a dim: to each rank its piece.

    Args:
        x: The same shape on all ranks, any strides; or a list of W pieces, which differ at most
            in `dim`.
        op: As in `all_reduce`.
        dim: The dim that is split.
        sizes: The pieces' sizes in `dim`; None for equal ones, or for those of a list.
        group: The default group, if None.
        async_op: Return a `Handle`.
        check: Compare with the other ranks first; see `checks`.

    Returns:
        This rank's piece.

    Adjoint: all_gather of the cotangents, then the op's rule as in `all_reduce`.

    Raises:
        ArgumentError: It cannot be split so, or the op is not defined for the dtype.
        MismatchError: With checks on, ranks disagree.

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
    x, reduction = reducible(x, op)
    front, dim = move_to_front(x, dim)
    split = sizes_of_split(sizes, front, dim, group, names=("sizes", "x"))
    known = None if sizes is None or len(set(split)) == 1 else split
    result = run_checked(
        group,
        front,
        check,
        lambda: CallSignature(
            "reduce_scatter",
            *consistency.tensor_fields(front),
            reduce=reduction,
            detail=f"dim={dim}, sizes={known}",
        ),
        lambda x, context: apply_reduction(
            ReduceScatter(group, known, reduction == "avg"), x, reduction, context, async_op
        ),
    )
    return then(result, lambda y: y.reshape(()) if scalars else move_back(y, dim))


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
