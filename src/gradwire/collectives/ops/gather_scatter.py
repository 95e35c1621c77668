"""gather and scatter: each is the other's adjoint.

Only the root holds all rows. On other ranks a tensor with any number of rows stands for them, so
that all ranks record the same graph. scatter does not read it, and gather fills it with zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, overload

from torch import Tensor
from torch.distributed import ProcessGroup

from gradwire.collectives import consistency, wire
from gradwire.collectives.arguments import (
    Sizes,
    move_back,
    move_to_front,
    refuse_in_transforms,
    resolve_group,
    resolve_sizes,
    root_of,
)
from gradwire.collectives.consistency import Refusal, gather_signature
from gradwire.collectives.handles import Async, Handle, Sync
from gradwire.collectives.linear_collective import LinearCollective, register_plan
from gradwire.collectives.operation import Operation, Peers
from gradwire.collectives.ops.scatter_source import ScatterSource, agree_on_source
from gradwire.errors import ArgumentError, ArgumentTypeError

if TYPE_CHECKING:
    from typing_extensions import Unpack


@register_plan
@dataclass(frozen=True)
class Gather(LinearCollective):
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
class Scatter(LinearCollective):
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
