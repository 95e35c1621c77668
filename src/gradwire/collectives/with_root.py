"""broadcast and reduce, gather and scatter: in each pair, one is the other's adjoint.

Only the root holds all rows of gather and scatter. On other ranks a tensor with any number of rows
stands for them, so that all ranks record the same graph. scatter does not read it, and gather fills
it with zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Unpack, overload

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from gradwire.collectives import consistency, wire
from gradwire.collectives.consistency import (
    CallSignature,
    CheckContext,
    Refusal,
    gather_signature,
    tensor_fields,
)
from gradwire.collectives.operation import (
    AsyncFrom,
    AsyncTo,
    Handle,
    Operation,
    Peers,
    Plan,
    SyncFrom,
    SyncTo,
    concat,
    divided,
    register_plan,
)
from gradwire.collectives.validation import (
    Op,
    Sizes,
    check_dense,
    check_has_data,
    move_back,
    move_to_front,
    piece_sizes,
    pieces_of,
    reduction_of,
    refuse_in_transforms,
    resolve_group,
    resolve_sizes,
    root_of,
    sizes_of_split,
    valid_sizes,
)
from gradwire.collectives.without_root import ReductionPlan
from gradwire.errors import ArgumentError, ArgumentTypeError


@register_plan
@dataclass(frozen=True)
class Broadcast(Plan):
    """Root's tensor on every rank; inputs of other ranks are not read."""

    root: int
    average: bool = False
    name = "broadcast"

    def start(self, x: Tensor, blocking: bool = False) -> wire.Pending:
        return divided(self, wire.broadcast(x, self.root, self.group, blocking))

    def adjoint(self) -> Reduce:
        return Reduce(self.group, self.root, "avg" if self.average else "sum")


@register_plan
@dataclass(frozen=True)
class Reduce(ReductionPlan):
    """Reduction on the root, zeros on other ranks."""

    root: int
    op: str = "sum"
    name = "reduce"

    def start(self, x: Tensor, blocking: bool = False) -> wire.Pending:
        return wire.reduce(x, self.root, self.op, self.group, blocking)

    def adjoint(self) -> Broadcast:
        return Broadcast(self.group, self.root, self.op == "avg")


@overload
def reduce(x: Tensor, dst: int | None = ..., op: Op = ..., **options: Unpack[SyncTo]) -> Tensor: ...
@overload
def reduce(
    x: Tensor, dst: int | None = ..., op: Op = ..., **options: Unpack[AsyncTo]
) -> Handle[Tensor]: ...
def reduce(
    x: Tensor,
    dst: int | None = None,
    op: Op = "sum",
    *,
    group_dst: int | None = None,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    check: bool | None = None,
) -> Any:
    """Reduce the tensors of all ranks on one rank; the others get zeros.

    Args:
        x: Tensor of the same shape on all ranks, with any strides.
        dst: Root's global rank.
        op: Reduction, as in `all_reduce`.
        group_dst: Root's rank in the group, instead of `dst`.
        group: Process group; the default group if None.
        async_op: True to return a `Handle`.
        check: True to compare the call with the other ranks first; see `checks`.

    Returns:
        A tensor of the shape and dtype of `x` on every rank. The loss must depend on it on every
        rank, for instance by its sum: the backward of the zeros takes part in the adjoint.

    Adjoint: broadcast of the root's cotangent, then the op's rule as in `all_reduce`. Cotangents
    of other ranks are ignored, because their results are constant.

    Raises:
        ArgumentError: Neither or both of `dst` and `group_dst` are given, or the op is not defined
            for the dtype.
        MismatchError: With checks on, the ranks disagree.

    Example:
        >>> from gradwire.collectives import reduce
        >>> def main():
        ...     return reduce(torch.tensor([dist.get_rank() + 1.0]), dst=0)
        >>> run_ranks(main, world_size=2)
        [tensor([3.]), tensor([0.])]
    """
    group = resolve_group(group)
    root = root_of(group, dst, group_dst, "dst")
    reduction = reduction_of(x, op)
    return Operation(
        x,
        group,
        lambda: CallSignature("reduce", *tensor_fields(x), reduce=reduction, root=root),
        lambda x, peers: Reduce(group, root, reduction),
    ).run(check, async_op)


@overload
def broadcast(
    x: Tensor | Sequence[int] | None, src: int | None = ..., **options: Unpack[SyncFrom]
) -> Tensor: ...
@overload
def broadcast(
    x: Tensor | Sequence[int] | None, src: int | None = ..., **options: Unpack[AsyncFrom]
) -> Handle[Tensor]: ...
def broadcast(
    x: Tensor | Sequence[int] | None,
    src: int | None = None,
    *,
    group_src: int | None = None,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    check: bool | None = None,
) -> Any:
    """Broadcast one rank's tensor to all ranks.

    Args:
        x: On the root, the tensor to send: any shape, dtype and strides. On other ranks, a tensor
            of the same shape, dtype and device, which must require a gradient if the root's does;
            its values are not read, and its gradient is zero. A tensor on "meta" stands for one on
            the group's device. With checks on, other ranks may pass the shape or None, and receive
            the rest from the root.
        src: Root's global rank.
        group_src: Root's rank in the group, instead of `src`.
        group: Process group; the default group if None.
        async_op: True to return a `Handle`.
        check: True to compare the call with the other ranks first; see `checks`.

    Returns:
        A new tensor with the root's values on every rank, including the root.

    Adjoint: the sum of the ranks' cotangents on the root, zeros elsewhere.

    Raises:
        ArgumentError: Neither or both of `src` and `group_src` are given, or a receiver has no
            tensor and checks are off.
        MismatchError: With checks on, the ranks disagree.
            NotSupportedError: A receiver has no tensor, or one on "meta", inside a `torch.func`
            transform.

    Example:
        >>> from gradwire.collectives import broadcast
        >>> def main():
        ...     x = torch.tensor([5.0]) if dist.get_rank() == 0 else None
        ...     return broadcast(x, src=0, check=True)
        >>> run_ranks(main, world_size=2)
        [tensor([5.]), tensor([5.])]
    """
    group = resolve_group(group)
    root = root_of(group, src, group_src, "src")
    requested = consistency.requested(check)
    own, refusal = None, None
    try:
        own = _tensor_or_shape(x, group.rank() == root, bool(requested))
    except (ArgumentError, ArgumentTypeError) as error:
        if not requested or group.rank() != root:
            raise
        refusal = Refusal(type(error), str(error))
    plan = Broadcast(group, root)
    y = own if isinstance(own, Tensor) else None
    shape = None if own is None else tuple(own if y is None else y.shape)
    dtype = None if y is None else y.dtype
    call = CallSignature("broadcast", shape, dtype, consistency.wants_grad(y), root=root)
    if not requested:
        assert y is not None
        operation = Operation(_off_meta(y, group), group, lambda: call, lambda x, peers: plan)
        return operation.run(requested, async_op)
    y, context, _ = consistency.agree_with_root(group, y, call, root, refusal)
    y = _off_meta(y, group)
    return plan.apply_async(y, context) if async_op else plan.apply(y, context)


def _off_meta(x: Tensor, group: ProcessGroup) -> Tensor:
    """Return the tensor; for one on "meta", a placeholder on a device that the group supports."""
    if not x.is_meta:
        return x
    refuse_in_transforms("x on meta", "give a tensor with the same transforms as the root's")
    return wire.placeholder(x.shape, x.dtype, x.requires_grad, group)


def _tensor_or_shape(x: object, at_root: bool, checked: bool) -> Tensor | Sequence[int] | None:
    """Return the tensor, or a receiver's shape or None, if they are allowed."""
    if isinstance(x, Tensor):
        check_dense(x)
        if at_root:
            check_has_data(x, "x")
        return x
    if at_root:
        raise ArgumentTypeError(f"x is a {type(x).__name__} on the root: give the tensor to send")
    if not checked:
        raise ArgumentError(
            f"x is {x!r} on a receiver, and checks are off: give a tensor of the root's shape and "
            "dtype (torch.empty(..., device='meta') will do), or check=True on every rank, so that "
            "the root sends them"
        )
    if x is None:
        return None
    if not isinstance(x, Sequence):
        raise ArgumentTypeError(f"x is a {type(x).__name__}: give a tensor, a shape or None")
    return x


@register_plan
@dataclass(frozen=True)
class Gather(Plan):
    """Rows of all ranks on the root, `other_rows` rows of zeros on other ranks."""

    root: int
    sizes: tuple[int, ...]
    other_rows: int
    name = "gather"

    def start(self, x: Tensor, blocking: bool = False) -> wire.Pending:
        return wire.gather(x, self.root, self.sizes, self.other_rows, self.group, blocking)

    def adjoint(self) -> Scatter:
        return Scatter(self.group, self.root, self.sizes, self.other_rows)

    def rows(self, rows: int) -> int:
        return sum(self.sizes) if self.group.rank() == self.root else self.other_rows


@register_plan
@dataclass(frozen=True)
class Scatter(Plan):
    """Root's rows, scattered; inputs of other ranks, of `other_rows` rows, are not read."""

    root: int
    sizes: tuple[int, ...]
    other_rows: int
    name = "scatter"

    def start(self, x: Tensor, blocking: bool = False) -> wire.Pending:
        return wire.scatter(x, self.root, self.sizes, self.group, blocking)

    def adjoint(self) -> Gather:
        return Gather(self.group, self.root, self.sizes, self.other_rows)

    def rows(self, rows: int) -> int:
        return self.sizes[self.group.rank()]


@overload
def gather(
    x: Tensor,
    dst: int | None = ...,
    dim: int = ...,
    *,
    sizes: Sizes = ...,
    stack: bool = ...,
    **options: Unpack[SyncTo],
) -> Tensor: ...
@overload
def gather(
    x: Tensor,
    dst: int | None = ...,
    dim: int = ...,
    *,
    sizes: Sizes = ...,
    stack: bool = ...,
    **options: Unpack[AsyncTo],
) -> Handle[Tensor]: ...
def gather(
    x: Tensor,
    dst: int | None = None,
    dim: int = 0,
    *,
    sizes: Sizes = None,
    stack: bool = False,
    group_dst: int | None = None,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    check: bool | None = None,
) -> Any:
    """Concatenate the tensors of all ranks along a dim, on one rank; the others get zeros.

    Args:
        x: Tensor, as in `all_gather`.
        dst: Root's global rank.
        dim: Dim along which to concatenate.
        sizes: Sizes of all ranks in `dim`, as in `all_gather`.
        stack: True to concatenate along a new dim, inserted before `dim`.
        group_dst: Root's rank in the group, instead of `dst`.
        group: Process group; the default group if None.
        async_op: True to return a `Handle`.
        check: True to compare the call with the other ranks first; see `checks`.

    Returns:
        The concatenation in rank order on the root, zeros of the same shape on other ranks. The
        loss must depend on the result on every rank.

    Adjoint: scatter of the root's cotangent. Cotangents of other ranks are ignored.

    Raises:
        ArgumentError: Neither or both of `dst` and `group_dst` are given, the sizes are wrong, or
            the tensor does not have the dim.
        MismatchError: With checks on, the ranks disagree.

    Example:
        >>> from gradwire.collectives import gather
        >>> def main():
        ...     return gather(torch.tensor([dist.get_rank() + 1.0]), dst=0)
        >>> run_ranks(main, world_size=2)
        [tensor([1., 2.]), tensor([0., 0.])]
    """
    group = resolve_group(group)
    root = root_of(group, dst, group_dst, "dst")
    front, dim = move_to_front(x, dim, stack)

    def plan(front: Tensor, peers: Peers) -> Gather:
        rows = front.shape[0]
        known = resolve_sizes(sizes, rows, group) or (rows,) * group.size()
        return Gather(group, root, known, sum(known))

    return Operation(
        front,
        group,
        lambda: gather_signature("gather", front, sizes, f"dim={dim}", group, root),
        plan,
        lambda _, y: move_back(y, dim),
    ).run(check, async_op)


@overload
def scatter(
    xs: Tensor | Sequence[Tensor] | None,
    src: int | None = ...,
    dim: int = ...,
    *,
    sizes: Sequence[int] | None = ...,
    like: Tensor | None = ...,
    **options: Unpack[SyncFrom],
) -> Tensor: ...
@overload
def scatter(
    xs: Tensor | Sequence[Tensor] | None,
    src: int | None = ...,
    dim: int = ...,
    *,
    sizes: Sequence[int] | None = ...,
    like: Tensor | None = ...,
    **options: Unpack[AsyncFrom],
) -> Handle[Tensor]: ...
def scatter(
    xs: Tensor | Sequence[Tensor] | None,
    src: int | None = None,
    dim: int = 0,
    *,
    sizes: Sequence[int] | None = None,
    like: Tensor | None = None,
    group_src: int | None = None,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    check: bool | None = None,
) -> Any:
    """Scatter one rank's tensor, split along a dim, or its list of tensors.

    Args:
        xs: On the root, a list with a tensor for each rank, whose sizes differ in `dim` only, or
            one tensor to split. On other ranks, None. Tensors given on other ranks are not read;
            their gradients are zero, so that the rank takes part in derivatives of higher order.
        src: Root's global rank.
        dim: Dim to split.
        sizes: Sizes into which to split the root's tensor; None for equal ones. Read on the root
            only, but required on every rank if `like` is given.
        like: Tensor of the shape, dtype and device that this rank will receive, given on every
            rank. It must require a gradient if the root's tensor does. A tensor on "meta" stands
            for one on the group's device. With `like`, only the data is sent; without it, the root
            first sends shape and sizes.
        group_src: Root's rank in the group, instead of `src`.
        group: Process group; the default group if None.
        async_op: True to return a `Handle`.
        check: True to compare the call with the other ranks first; see `checks`.

    Returns:
        This rank's piece.

    Adjoint: gather of the cotangents on the root.

    Raises:
        ArgumentError: Neither or both of `src` and `group_src` are given, or there is not a piece
            for each rank. Raised on every rank with checks on, or without `like`.
        MismatchError: With checks on, or without `like`, the ranks disagree.
        NotSupportedError: `like` is None or on "meta", inside a `torch.func` transform.

    Example:
        >>> from gradwire.collectives import scatter
        >>> def main():
        ...     xs = [torch.tensor([1.0]), torch.tensor([2.0])] if dist.get_rank() == 0 else None
        ...     return scatter(xs, src=0)
        >>> run_ranks(main, world_size=2)
        [tensor([1.]), tensor([2.])]
    """
    group = resolve_group(group)
    root = root_of(group, src, group_src, "src")
    if like is None:
        refuse_in_transforms("scatter without like", "give like on every rank")
    at_root, exchanges = group.rank() == root, like is None or bool(consistency.requested(check))
    source, refusal = None, None
    context: CheckContext = consistency.unchecked
    if at_root:
        try:
            source = _source_on_root(xs, dim, sizes, group)
        except (ArgumentError, ArgumentTypeError) as error:
            if not exchanges:
                raise
            refusal = Refusal(type(error), str(error))
    elif like is not None:
        source = _source_like(like, dim, sizes, group)
    if exchanges:
        source, context = _agree_on_source(source, refusal, root, dim, group)
    assert source is not None
    agreed, rows = source, source.rows
    if not at_root:
        if not exchanges:
            resolve_sizes(agreed.sizes, agreed.expected_rows, group)
        if like is None:
            rows = _attached(rows, xs)
    plan = Scatter(group, root, agreed.sizes, len(rows))

    def finish(y: Tensor) -> Tensor:
        return y.reshape(()) if agreed.scalars else move_back(y, agreed.dim)

    if async_op:
        return plan.apply_async(rows, context).then(finish)
    return finish(plan.apply(rows, context))


@dataclass(frozen=True)
class _Source:
    """Tensor that a scatter splits, as this rank knows it before any data is sent."""

    # Rows of all pieces on the root; on a receiver, any number of rows of the same shape, which
    # stand for them in the graph.
    rows: Tensor
    sizes: tuple[int, ...]
    # Original position of the split dim.
    dim: int
    # True if the pieces are 0-d.
    scalars: bool = False
    # Number of rows of a receiver's `like`.
    expected_rows: int = 0


def _source_on_root(
    xs: object, dim: int, sizes: Sequence[int] | None, group: ProcessGroup
) -> _Source:
    if isinstance(xs, Tensor):
        front, dim = move_to_front(xs, dim)
        check_has_data(xs, "xs")
        return _Source(front, sizes_of_split(sizes, front, dim, group, names=("sizes", "xs")), dim)
    pieces, dim, scalars = pieces_of(xs, dim, group, "xs")
    check_has_data(pieces[0], "xs[0]")
    known = piece_sizes(pieces, dim, sizes, group)
    return _Source(concat([piece.movedim(dim, 0) for piece in pieces]), known, dim, scalars)


def _source_like(
    like: Tensor, dim: int, sizes: Sequence[int] | None, group: ProcessGroup
) -> _Source:
    """Return the source of a receiver that has a tensor of the shape that it will receive."""
    check_dense(like, "like")
    front, dim = move_to_front(like, dim)
    rows = front
    if like.is_meta:
        refuse_in_transforms("like on meta", "give a tensor with the same transforms as xs")
        rows = wire.placeholder((0, *front.shape[1:]), like.dtype, like.requires_grad, group)
    given = sizes if sizes is not None else (front.shape[0],) * group.size()
    return _Source(rows, valid_sizes(given, group, "sizes"), dim, not like.dim(), front.shape[0])


def _agree_on_source(
    source: _Source | None, refusal: Refusal | None, root: int, dim: int, group: ProcessGroup
) -> tuple[_Source, CheckContext]:
    """Compare the call; ranks without a source receive shape and sizes from the root."""
    own = None if source is None else source.rows
    wants = consistency.wants_grad(own)
    call = CallSignature("scatter", None, None, wants, root=root, detail=f"dim={dim}", ragged=True)
    if source is not None:
        shape = () if source.scalars else tuple(source.rows.shape)
        call = call._replace(shape=shape, dtype=source.rows.dtype)
        if group.rank() == root:
            call = call._replace(send=source.sizes)
        else:
            expected = [source.expected_rows if r == root else -1 for r in range(group.size())]
            call = call._replace(receive=expected)
    rows, context, peers = consistency.agree_with_root(group, own, call, root, refusal)
    sizes = tuple(peers[root].send)
    if source is not None:
        return replace(source, rows=rows, sizes=sizes), context
    empty = rows.new_empty((0, *rows.shape[1:])).requires_grad_(rows.requires_grad)
    return _Source(empty, sizes, dim % max(1, rows.dim()), not rows.dim()), context


def _attached(rows: Tensor, xs: Tensor | Sequence[Tensor] | None) -> Tensor:
    """Return a receiver's empty rows, which depend on its tensors."""
    # A derivative of second order then reaches these tensors, with zeros, and this rank takes part
    # in the collectives that they depend on.
    own = [xs] if isinstance(xs, Tensor) else xs or ()
    empty = [x.reshape(-1)[:0].to(rows) for x in own if x.requires_grad]
    if not empty or not rows.requires_grad:
        return rows
    # Not torch.cat, whose backward skips empty tensors.
    return torch.stack(empty).reshape(rows.shape)
