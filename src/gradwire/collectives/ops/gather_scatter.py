"""gather and scatter: each is the other's adjoint.

Only the root holds all rows. The other ranks have a tensor of any number of rows in its place, so
that the graph is the same on all: scatter does not read it, gather fills it with zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, overload

from torch import Tensor
from torch.distributed import ProcessGroup

from gradwire.collectives import wire
from gradwire.collectives.args.ranks import member, root_of
from gradwire.collectives.args.sizes import (
    Sizes,
    move_back,
    move_to_front,
    resolve_sizes,
    sizes_text,
)
from gradwire.collectives.args.transforms import refuse_in_transforms
from gradwire.collectives.autograd.handles import Handle, after, run
from gradwire.collectives.autograd.linear import Linear, register
from gradwire.collectives.checks import consistency
from gradwire.collectives.checks.call_signature import CallSignature
from gradwire.collectives.ops.checked import run_checked
from gradwire.collectives.ops.scatter_source import ScatterSource, agree_on_source
from gradwire.collectives.wire import Pending

__all__ = ["gather", "scatter"]


@register
@dataclass(frozen=True)
class Gather(Linear):
    """All ranks' rows on the root; `elsewhere` rows of zeros on the others."""

    root: int
    sizes: tuple[int, ...]
    elsewhere: int
    name = "gather"

    def start(self, x: Tensor, blocking: bool = False) -> Pending:
        return wire.gather(x, self.root, self.sizes, self.elsewhere, self.group, blocking)

    def adjoint(self) -> Scatter:
        return Scatter(self.group, self.root, self.sizes, self.elsewhere)

    def rows(self, rows: int) -> int:
        return sum(self.sizes) if self.group.rank() == self.root else self.elsewhere


@register
@dataclass(frozen=True)
class Scatter(Linear):
    """The root's rows, some to each rank; the others' input, `elsewhere` rows, is not read."""

    root: int
    sizes: tuple[int, ...]
    elsewhere: int
    name = "scatter"

    def start(self, x: Tensor, blocking: bool = False) -> Pending:
        return wire.scatter(x, self.root, self.sizes, self.group, blocking)

    def adjoint(self) -> Gather:
        return Gather(self.group, self.root, self.sizes, self.elsewhere)

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
    group: ProcessGroup | None = ...,
    async_op: Literal[False] = ...,
    check: bool | None = ...,
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
    group: ProcessGroup | None = ...,
    async_op: Literal[True],
    check: bool | None = ...,
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
    """All ranks' tensors concatenated along a dim, on one rank; zeros on the others.

    Args:
        x: As in `all_gather`.
        dst: The root's global rank.
        dim: The dim along which they are concatenated.
        sizes: As in `all_gather`.
        stack: Concatenate along a new dim instead, before `dim`.
        group_dst: The root's rank in the group, instead of `dst`.
        group: The default group, if None.
        async_op: Return a `Handle`.
        check: Compare with the other ranks first; see `checks`.

    Returns:
        On the root the concatenation in rank order; zeros of that shape on the others, to be used
        there in what backward is called on.

    Adjoint: scatter of the root's cotangent; cotangents of the other ranks are ignored.

    Raises:
        ArgumentError: No root or two, sizes that are not the ranks', or no such dim.
        MismatchError: With checks on, ranks disagree.

    Example:
        >>> from gradwire.collectives import gather
        >>> def main():
        ...     return gather(torch.tensor([dist.get_rank() + 1.0]), dst=0)
        >>> run_ranks(main, world_size=2)
        [tensor([1., 2.]), tensor([0., 0.])]
    """
    group = member(group)
    root = root_of(group, dst, group_dst, "dst")
    front, dim = move_to_front(x, dim, stack)

    def describe(front: Tensor) -> CallSignature:
        text = f"dim={dim}, {sizes_text(sizes)}"
        return consistency.describe(
            "gather", front, root=root, detail=text, ragged=sizes is not None
        )

    def start(front: Tensor, context: consistency.CheckContext | None) -> Any:
        known = resolve_sizes(sizes, front.shape[0], group) or (front.shape[0],) * group.size()
        return run(Gather(group, root, known, sum(known)), front, context, async_op)

    gathered = run_checked(
        group, front, consistency.requested(check), describe, start, alike=sizes is None
    )
    return after(gathered, lambda y: move_back(y, dim))


@overload
def scatter(
    xs: Tensor | Sequence[Tensor] | None,
    src: int | None = ...,
    dim: int = ...,
    *,
    sizes: Sequence[int] | None = ...,
    like: Tensor | None = ...,
    group_src: int | None = ...,
    group: ProcessGroup | None = ...,
    async_op: Literal[False] = ...,
    check: bool | None = ...,
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
    group: ProcessGroup | None = ...,
    async_op: Literal[True],
    check: bool | None = ...,
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
    """One rank's tensor, split along a dim, or its list of tensors: to each rank its piece.

    Args:
        xs: On the root a list with a tensor for each rank, which differ at most in `dim`, or one
            tensor that is split. On the other ranks None; tensors given there are not read; they
            get gradients of zeros, so that the rank takes part in further derivatives.
        src: The root's global rank.
        dim: The dim that is split.
        sizes: The sizes into which the root's tensor is split; None for equal ones. Those of the
            root are used; with `like`, every rank gives them.
        like: On every rank a tensor of the shape, dtype and device that it will receive (one on
            "meta" will do, for the group's device), which requires a gradient where the root's
            does. Then nothing is sent besides the data; without it the root first sends shape and
            sizes.
        group_src: The root's rank in the group, instead of `src`.
        group: The default group, if None.
        async_op: Return a `Handle`.
        check: Compare with the other ranks first; see `checks`.

    Returns:
        This rank's piece.

    Adjoint: gather of the cotangents on the root.

    Raises:
        ArgumentError: No root or two, or not a piece for each rank.
        MismatchError: Ranks disagree, with checks on or without `like`.
        NotSupportedError: Without `like`, or with one on "meta", inside torch.func's transforms.

    Example:
        >>> from gradwire.collectives import scatter
        >>> def main():
        ...     xs = [torch.tensor([1.0]), torch.tensor([2.0])] if dist.get_rank() == 0 else None
        ...     return scatter(xs, src=0)
        >>> run_ranks(main, world_size=2)
        [tensor([1.]), tensor([2.])]
    """
    group = member(group)
    root = root_of(group, src, group_src, "src")
    source: ScatterSource | None = None
    if group.rank() == root:
        source = ScatterSource.on_root(xs, dim, sizes, group)
    elif like is not None:
        source = ScatterSource.from_like(like, dim, sizes, group)
    context = None
    if like is None:
        refuse_in_transforms("scatter without like", "give it on every rank")
    if like is None or consistency.enabled(check):
        source, context = agree_on_source(source, root, dim, group)
    elif source is not None and group.rank() != root:
        resolve_sizes(source.sizes, source.expected_rows, group)
    assert source is not None
    if group.rank() != root and like is None:
        source = source.attach_to(xs)
    op = Scatter(group, root, source.sizes, len(source.rows))
    result = run(op, source.rows, context, async_op)
    return after(result, lambda y: y.reshape(()) if source.scalars else move_back(y, source.dim))
