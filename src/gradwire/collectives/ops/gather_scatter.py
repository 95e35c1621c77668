"""gather and scatter: each is the other's adjoint.

Only the root holds the whole. On the other ranks a tensor of as many rows as one likes stands for
it, so that the graph is the same everywhere: scatter does not look at it, gather makes it zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, overload

from torch import Tensor
from torch.distributed import ProcessGroup

from gradwire.collectives import wire
from gradwire.collectives.args.ranks import dense_tensor, member, root_of
from gradwire.collectives.args.sizes import (
    Sizes,
    dim_back,
    dim_in_front,
    resolve_sizes,
    sizes_in_words,
    valid_dim,
)
from gradwire.collectives.args.transforms import refuse_in_transforms
from gradwire.collectives.autograd.handles import Handle, after, run
from gradwire.collectives.autograd.linear import Linear, register
from gradwire.collectives.checks import consistency
from gradwire.collectives.checks.call_signature import Call
from gradwire.collectives.ops.checked import agreed
from gradwire.collectives.ops.scatter_source import Whole, told
from gradwire.collectives.wire import Pending

__all__ = ["gather", "scatter"]


@register
@dataclass(frozen=True)
class Gather(Linear):
    """All ranks' rows on the root; that many rows of zeros elsewhere."""

    group: ProcessGroup
    root: int
    sizes: tuple[int, ...]
    elsewhere: int
    name = "gather"

    def start(self, x: Tensor, now: bool = False) -> Pending:
        return wire.gather(x, self.root, self.sizes, self.elsewhere, self.group, now)

    def adjoint(self) -> Scatter:
        return Scatter(self.group, self.root, self.sizes, self.elsewhere)

    def rows(self, rows: int) -> int:
        return sum(self.sizes) if self.group.rank() == self.root else self.elsewhere

    def plan(self) -> list[int]:
        return [self.root, self.elsewhere, *self.sizes]

    @classmethod
    def of(cls, plan: Sequence[int], group: ProcessGroup) -> Gather:
        return cls(group, plan[0], tuple(plan[2:]), plan[1])


@register
@dataclass(frozen=True)
class Scatter(Linear):
    """The root's rows, dealt out; the others' input, of that many rows, is not looked at."""

    group: ProcessGroup
    root: int
    sizes: tuple[int, ...]
    elsewhere: int
    name = "scatter"

    def start(self, x: Tensor, now: bool = False) -> Pending:
        return wire.scatter(x, self.root, self.sizes, self.group, now)

    def adjoint(self) -> Gather:
        return Gather(self.group, self.root, self.sizes, self.elsewhere)

    def rows(self, rows: int) -> int:
        return self.sizes[self.group.rank()]

    def plan(self) -> list[int]:
        return [self.root, self.elsewhere, *self.sizes]

    @classmethod
    def of(cls, plan: Sequence[int], group: ProcessGroup) -> Scatter:
        return cls(group, plan[0], tuple(plan[2:]), plan[1])


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
    """All ranks' tensors joined along a dim, on one rank; zeros on the others.

    Args:
        x: As in `all_gather`.
        dst: The root's global rank.
        dim: The dim that is joined.
        sizes: As in `all_gather`.
        stack: Join along a new dim instead, before `dim`.
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
    dense_tensor(x)
    if stack:
        x = x.unsqueeze(valid_dim(dim, x.dim() + 1, x.shape))
    front, dim = dim_in_front(x, dim)

    def describe(front: Tensor) -> Call:
        text = f"dim={dim}, {sizes_in_words(sizes)}"
        return consistency.describe(
            "gather", front, root=root, detail=text, ragged=sizes is not None
        )

    def go(front: Tensor, note: consistency.Note | None) -> Any:
        known = resolve_sizes(sizes, len(front), group) or (len(front),) * group.size()
        return run(Gather(group, root, known, sum(known)), front, note, async_op)

    whole = agreed(group, front, check, describe, go, alike=sizes is None)
    return after(whole, lambda y: dim_back(y, dim))


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
    """One rank's tensor, cut along a dim, or its list of tensors: to each rank its piece.

    Args:
        xs: On the root a list with a tensor for each rank, which differ at most in `dim`, or one
            tensor that is cut. On the other ranks None; tensors are not looked at there and get
            gradients of zeros, by which the rank takes part in further derivatives.
        src: The root's global rank.
        dim: The dim that is cut.
        sizes: The sizes into which the root's tensor is cut; None for equal ones. The root's word
            counts, but with `like` every rank gives them.
        like: On every rank a tensor of the shape, dtype and device that it will receive (one on
            "meta" will do, for the group's device), which requires a gradient where the root's
            does. Then nothing is sent besides the data; without it the root tells them first.
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
    if group.rank() == root:
        whole = Whole.of(xs, dim, sizes, group)
    elif like is not None:
        whole = Whole.expected(like, dim, sizes, group)
    else:
        whole = None
    note = None
    if like is None:
        refuse_in_transforms("scatter without like", "give it on every rank")
    if like is None or consistency.enabled(check):
        whole, note = told(whole, root, dim, group)
    elif whole is not None and group.rank() != root:
        resolve_sizes(whole.sizes, whole.expected_rows, group)
    assert whole is not None
    if group.rank() != root and like is None:
        whole = whole.hung_on(xs)
    op = Scatter(group, root, whole.sizes, len(whole.rows))
    result = run(op, whole.rows, note, async_op)
    return after(result, lambda y: y.reshape(()) if whole.numbers else dim_back(y, whole.dim))
