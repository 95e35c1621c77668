"""broadcast and reduce: each is the other's adjoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Unpack, overload

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from gradwire.collectives import consistency, wire
from gradwire.collectives.all_reduce_vary import ReductionCollective, reduce_with
from gradwire.collectives.backends import Pending, placeholder
from gradwire.collectives.consistency import (
    CallSignature,
    CheckContext,
    Refusal,
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
from gradwire.errors import ArgumentError, ArgumentTypeError


@register_plan
@dataclass(frozen=True)
class Broadcast(LinearCollective):
    """Root's tensor on every rank; inputs of other ranks are not read."""

    root: int
    average: bool = False
    name = "broadcast"

    def start(self, x: Tensor, blocking: bool = False) -> Pending:
        return divided(self, wire.broadcast(x, self.root, self.group, blocking))

    def adjoint(self) -> Reduce:
        return Reduce(self.group, self.root, self.average)


@register_plan
@dataclass(frozen=True)
class Reduce(ReductionCollective):
    """Sum or average on the root, zeros on other ranks."""

    root: int
    average: bool = False
    name = "reduce"

    def start_reduction(self, x: Tensor, op: str, blocking: bool = False) -> Pending:
        return wire.reduce(x, self.root, op, self.group, blocking)

    def adjoint(self) -> Broadcast:
        return Broadcast(self.group, self.root, self.average)


@overload
def reduce(
    x: Tensor,
    dst: int | None = ...,
    op: Op = ...,
    *,
    group_dst: int | None = ...,
    **options: Unpack[Sync],
) -> Tensor: ...
@overload
def reduce(
    x: Tensor,
    dst: int | None = ...,
    op: Op = ...,
    *,
    group_dst: int | None = ...,
    **options: Unpack[Async],
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
    plan = reduce_with(reduction, Reduce(group, root, reduction == "avg"))
    operation = Operation(
        x,
        group,
        lambda: CallSignature("reduce", *tensor_fields(x), reduce=reduction, root=root),
        lambda x, peers: plan,
    )
    return operation.run(check, async_op)


@overload
def broadcast(
    x: Tensor | Sequence[int] | None,
    src: int | None = ...,
    *,
    group_src: int | None = ...,
    **options: Unpack[Sync],
) -> Tensor: ...
@overload
def broadcast(
    x: Tensor | Sequence[int] | None,
    src: int | None = ...,
    *,
    group_src: int | None = ...,
    **options: Unpack[Async],
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
    given: Tensor | Sequence[int] | Refusal | None
    try:
        given = _tensor_or_shape(x, group.rank() == root, bool(requested))
    except (ArgumentError, ArgumentTypeError) as error:
        if not requested or group.rank() != root:
            raise
        given = Refusal(type(error), str(error))
    plan = Broadcast(group, root)
    if requested:
        y, context = _agree(given, root, group)
        y = _off_meta(y, group)
        return plan.apply_async(y, context) if async_op else plan.apply(y, context)
    assert isinstance(given, Tensor)
    operation = Operation(
        _off_meta(given, group),
        group,
        lambda: CallSignature("broadcast", *tensor_fields(given), root=root),
        lambda x, peers: plan,
    )
    return operation.run(requested, async_op)


def _agree(
    x: Tensor | Sequence[int] | Refusal | None, root: int, group: ProcessGroup
) -> tuple[Tensor, CheckContext]:
    """Compare the call; return the tensor to broadcast, a placeholder if this rank has none."""
    own = x if isinstance(x, Tensor) else None
    refusal = x if isinstance(x, Refusal) else None
    if own is not None:
        call = CallSignature("broadcast", *tensor_fields(own), root=root)
    else:
        shape = None if x is None or isinstance(x, Refusal) else tuple(x)
        call = CallSignature("broadcast", shape, None, consistency.grad_mode(), root=root)
    y, context, _ = consistency.agree_with_root(group, own, call, root, refusal)
    return y, context


def _off_meta(x: Tensor, group: ProcessGroup) -> Tensor:
    """Return the tensor; for one on "meta", a placeholder on a device that the group supports."""
    if not x.is_meta:
        return x
    refuse_in_transforms("x on meta", "give a tensor with the same transforms as the root's")
    return placeholder(x.shape, x.dtype, x.requires_grad, group)


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


@dataclass(frozen=True)
class ScatterSource:
    """Tensor that a scatter splits, with the split dim in front.

    Args:
        rows: Rows of all pieces on the root; on a receiver, any number of rows of the same shape,
            which stand for them in the graph.
        sizes: Number of rows of each rank.
        dim: Original position of the split dim.
        scalars: True if the pieces are 0-d.
        expected_rows: Number of rows of a receiver's `like`.
    """

    rows: Tensor
    sizes: tuple[int, ...]
    dim: int
    scalars: bool = False
    expected_rows: int = 0

    @classmethod
    def on_root(
        cls, xs: object, dim: int, sizes: Sequence[int] | None, group: ProcessGroup
    ) -> ScatterSource:
        """Create from the root's tensor or list of tensors."""
        if isinstance(xs, Tensor):
            front, dim = move_to_front(xs, dim)
            check_has_data(xs, "xs")
            split = sizes_of_split(sizes, front, dim, group, names=("sizes", "xs"))
            return cls(front, split, dim)
        pieces, dim, scalars = pieces_of(xs, dim, group, "xs")
        check_has_data(pieces[0], "xs[0]")
        known = piece_sizes(pieces, dim, sizes, group)
        return cls(concat([piece.movedim(dim, 0) for piece in pieces]), known, dim, scalars)

    @classmethod
    def from_like(
        cls, like: Tensor, dim: int, sizes: Sequence[int] | None, group: ProcessGroup
    ) -> ScatterSource:
        """Create on a receiver that has a tensor of the shape that it will receive."""
        check_dense(like, "like")
        scalars = not like.dim()
        front, dim = rows, dim = move_to_front(like, dim)
        if like.is_meta:
            refuse_in_transforms("like on meta", "give a tensor with the same transforms as xs")
            rows = placeholder((0, *front.shape[1:]), like.dtype, like.requires_grad, group)
        given = (front.shape[0],) * group.size()
        if sizes is not None:
            given = valid_sizes(sizes, group, "sizes")
        return cls(rows, given, dim, scalars, front.shape[0])

    def attach_to(self, xs: Tensor | Sequence[Tensor] | None) -> ScatterSource:
        """Return a copy for a receiver without rows, whose rows depend on the receiver's tensors.

        A derivative of second order then reaches these tensors, with zeros, and this rank takes
        part in the collectives that they depend on.
        """
        own = [xs] if isinstance(xs, Tensor) else xs or ()
        empty = [x.reshape(-1)[:0].to(self.rows) for x in own if x.requires_grad]
        if not empty or not self.rows.requires_grad:
            return self
        # Not torch.cat, whose backward skips empty tensors.
        return replace(self, rows=torch.stack(empty).reshape(self.rows.shape))


def agree_on_source(
    source: ScatterSource | Refusal | None, root: int, dim: int, group: ProcessGroup
) -> tuple[ScatterSource, CheckContext]:
    """Compare the call; ranks without a source receive shape and sizes from the root.

    Args:
        source: Source of this rank, if it has one; on the root, an argument error if it has none.
        root: Root's rank in the group.
        dim: Argument of the public function.
        group: Process group.

    Raises:
        MismatchError: On every rank, if the ranks disagree.
        ArgumentError, ArgumentTypeError: On every rank, if the root's arguments cannot be used, or
            its tensor has too many dims for a signature.
    """
    refusal: Refusal | None = None
    if isinstance(source, Refusal):
        source, refusal = None, source
    at_root = group.rank() == root
    call = CallSignature("scatter", None, None, root=root, detail=f"dim={dim}", ragged=True)
    if source is None:
        call = call._replace(wants_grad=consistency.grad_mode())
    else:
        call = call._replace(
            shape=() if source.scalars else tuple(source.rows.shape),
            dtype=source.rows.dtype,
            wants_grad=consistency.wants_grad(source.rows),
            send=source.sizes if at_root else (),
            receive=() if at_root else _expected(source.expected_rows, root, group),
        )
    own = None if source is None else source.rows
    rows, context, peers = consistency.agree_with_root(group, own, call, root, refusal)
    sizes = tuple(peers[root].send)
    if source is not None:
        return replace(source, rows=rows, sizes=sizes), context
    empty = rows.new_empty((0, *rows.shape[1:])).requires_grad_(rows.requires_grad)
    return ScatterSource(empty, sizes, dim % max(1, rows.dim()), not rows.dim()), context


def _expected(rows: int, root: int, group: ProcessGroup) -> list[int]:
    """Return the number of rows that a receiver with `like` expects from each rank."""
    return [rows if rank == root else -1 for rank in range(group.size())]


@register_plan
@dataclass(frozen=True)
class Gather(LinearCollective):
    """Rows of all ranks on the root, `other_rows` rows of zeros on other ranks."""

    root: int
    sizes: tuple[int, ...]
    other_rows: int
    name = "gather"

    def start(self, x: Tensor, blocking: bool = False) -> Pending:
        return wire.gather(x, self.root, self.sizes, self.other_rows, self.group, blocking)

    def adjoint(self) -> Scatter:
        return Scatter(self.group, self.root, self.sizes, self.other_rows)

    def rows(self, rows: int) -> int:
        return sum(self.sizes) if self.group.rank() == self.root else self.other_rows


@register_plan
@dataclass(frozen=True)
class Scatter(LinearCollective):
    """Root's rows, scattered; inputs of other ranks, of `other_rows` rows, are not read."""

    root: int
    sizes: tuple[int, ...]
    other_rows: int
    name = "scatter"

    def start(self, x: Tensor, blocking: bool = False) -> Pending:
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
    group_dst: int | None = ...,
    **options: Unpack[Sync],
) -> Tensor: ...
@overload
def gather(
    x: Tensor,
    dst: int | None = ...,
    dim: int = ...,
    *,
    sizes: Sizes = ...,
    stack: bool = ...,
    group_dst: int | None = ...,
    **options: Unpack[Async],
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

    operation = Operation(
        front,
        group,
        lambda: gather_signature("gather", front, sizes, f"dim={dim}", root),
        plan,
        lambda _, y: move_back(y, dim),
    )
    return operation.run(check, async_op)


@overload
def scatter(
    xs: Tensor | Sequence[Tensor] | None,
    src: int | None = ...,
    dim: int = ...,
    *,
    sizes: Sequence[int] | None = ...,
    like: Tensor | None = ...,
    group_src: int | None = ...,
    **options: Unpack[Sync],
) -> Tensor: ...
@overload
def scatter(
    xs: Tensor | Sequence[Tensor] | None,
    src: int | None = ...,
    dim: int = ...,
    *,
    sizes: Sequence[int] | None = ...,
    like: Tensor | None = ...,
    group_src: int | None = ...,
    **options: Unpack[Async],
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
    checked = consistency.enabled(check)
    source, context = _agreed_source(xs, root, dim, sizes, like, group, checked=checked)
    plan = Scatter(group, root, source.sizes, len(source.rows))
    rows = source.rows

    def finish(y: Tensor) -> Tensor:
        return y.reshape(()) if source.scalars else move_back(y, source.dim)

    if async_op:
        return plan.apply_async(rows, context).then(finish)
    return finish(plan.apply(rows, context))


def _agreed_source(
    xs: Any,
    root: int,
    dim: int,
    sizes: Sequence[int] | None,
    like: Tensor | None,
    group: ProcessGroup,
    *,
    checked: bool,
) -> tuple[ScatterSource, consistency.CheckContext]:
    """Return the root's tensor as rows: of the root's argument, of `like`, or as the root tells."""
    exchanges = like is None or checked
    source: ScatterSource | Refusal | None = None
    if group.rank() == root:
        try:
            source = ScatterSource.on_root(xs, dim, sizes, group)
        except (ArgumentError, ArgumentTypeError) as error:
            if not exchanges:
                raise
            source = Refusal(type(error), str(error))
    elif like is not None:
        source = ScatterSource.from_like(like, dim, sizes, group)
    context = consistency.UNCHECKED
    if exchanges:
        source, context = agree_on_source(source, root, dim, group)
    assert isinstance(source, ScatterSource)
    if not exchanges and group.rank() != root:
        resolve_sizes(source.sizes, source.expected_rows, group)
    if group.rank() != root and like is None:
        source = source.attach_to(xs)
    return source, context
