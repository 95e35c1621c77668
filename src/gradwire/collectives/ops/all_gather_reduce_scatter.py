"""all_gather and reduce_scatter: each is the other's adjoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, overload

from torch import Tensor
from torch.distributed import ProcessGroup

from gradwire.collectives import wire
from gradwire.collectives.args.lists import concat, piece_sizes, pieces_of
from gradwire.collectives.args.ranks import dense_tensor, member
from gradwire.collectives.args.reductions import Op, as_reduction, check_reducible, premultiplied
from gradwire.collectives.args.sizes import (
    Sizes,
    dim_back,
    dim_in_front,
    equal_part,
    resolve_sizes,
    sizes_in_words,
    valid_dim,
    valid_sizes,
)
from gradwire.collectives.autograd.handles import Handle, after, run
from gradwire.collectives.autograd.linear import Linear, linear, register
from gradwire.collectives.checks import consistency
from gradwire.collectives.checks.call_signature import Call
from gradwire.collectives.ops.all_reduce import AllReduce
from gradwire.collectives.ops.checked import agreed
from gradwire.collectives.ops.nonlinear import Reducing, reduce_with
from gradwire.collectives.wire import Pending
from gradwire.errors import ArgumentError

__all__ = ["all_gather", "reduce_scatter"]


@register
@dataclass(frozen=True)
class AllGather(Linear):
    """All ranks' rows, on every rank."""

    group: ProcessGroup
    sizes: tuple[int, ...] | None = None
    name = "all_gather"

    def start(self, x: Tensor, now: bool = False) -> Pending:
        return wire.all_gather(x, self.sizes, self.group, now)

    def adjoint(self) -> ReduceScatter:
        return ReduceScatter(self.group, self.sizes)

    def rows(self, rows: int) -> int:
        return rows * self.group.size() if self.sizes is None else sum(self.sizes)

    def plan(self) -> list[int]:
        return list(self.sizes or ())

    @classmethod
    def of(cls, plan: Sequence[int], group: ProcessGroup) -> AllGather:
        return cls(group, tuple(plan) or None)


@register
@dataclass(frozen=True)
class ReduceScatter(Reducing):
    """The sum's rows, dealt out."""

    group: ProcessGroup
    sizes: tuple[int, ...] | None = None
    name = "reduce_scatter"

    def start(self, x: Tensor, now: bool = False) -> Pending:
        return wire.reduce_scatter(x, self.sizes, "sum", self.group, now)

    def start_with(self, x: Tensor, op: str, now: bool = False) -> Pending:
        return wire.reduce_scatter(x, self.sizes, op, self.group, now)

    def everywhere(self, y: Tensor) -> Tensor:
        return linear(self.adjoint(), y)

    def total(self, x: Tensor) -> Tensor:
        return linear(AllReduce(self.group), x)

    def adjoint(self) -> AllGather:
        return AllGather(self.group, self.sizes)

    def rows(self, rows: int) -> int:
        if self.sizes is None:
            return rows // self.group.size()
        return self.sizes[self.group.rank()]

    def plan(self) -> list[int]:
        return list(self.sizes or ())

    @classmethod
    def of(cls, plan: Sequence[int], group: ProcessGroup) -> ReduceScatter:
        return cls(group, tuple(plan) or None)


@overload
def all_gather(
    x: Tensor,
    dim: int = ...,
    *,
    sizes: Sizes = ...,
    stack: bool = ...,
    group: ProcessGroup | None = ...,
    async_op: Literal[False] = ...,
    check: bool | None = ...,
) -> Tensor: ...
@overload
def all_gather(
    x: Tensor,
    dim: int = ...,
    *,
    sizes: Sizes = ...,
    stack: bool = ...,
    group: ProcessGroup | None = ...,
    async_op: Literal[True],
    check: bool | None = ...,
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
    """All ranks' tensors joined along a dim, on all ranks.

    Args:
        x: The same shape on all ranks but for `dim` where sizes are given; any dtype and strides.
            A 0-d tensor counts as one of size 1.
        dim: The dim that is joined.
        sizes: The ranks' sizes in `dim`, the same list on all; "find" to have them exchanged
            first; None if all are equal.
        stack: Join along a new dim instead, before `dim`.
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
    dense_tensor(x)
    if stack:
        x = x.unsqueeze(valid_dim(dim, x.dim() + 1, x.shape))
    front, dim = dim_in_front(x, dim)
    whole = agreed_gather(
        front,
        sizes,
        f"dim={dim}",
        member(group),
        check,
        lambda op, front, note: run(op, front, note, async_op),
    )
    return after(whole, lambda y: dim_back(y, dim))


def agreed_gather(
    front: Tensor,
    sizes: Sizes,
    detail: str,
    group: ProcessGroup,
    check: bool | None,
    go: Callable[[AllGather, Tensor, consistency.Note | None], Any],
) -> Any:
    """What `go` makes of the op that gathers these rows, once ranks agree."""

    def describe(front: Tensor) -> Call:
        text = f"{detail}, {sizes_in_words(sizes)}"
        return consistency.describe("all_gather", front, detail=text, ragged=sizes is not None)

    def gathered(front: Tensor, note: consistency.Note | None) -> Any:
        return go(AllGather(group, resolve_sizes(sizes, len(front), group)), front, note)

    return agreed(group, front, check, describe, gathered, alike=sizes is None)


@overload
def reduce_scatter(
    x: Tensor | Sequence[Tensor],
    op: Op = ...,
    dim: int = ...,
    *,
    sizes: Sequence[int] | None = ...,
    group: ProcessGroup | None = ...,
    async_op: Literal[False] = ...,
    check: bool | None = ...,
) -> Tensor: ...
@overload
def reduce_scatter(
    x: Tensor | Sequence[Tensor],
    op: Op = ...,
    dim: int = ...,
    *,
    sizes: Sequence[int] | None = ...,
    group: ProcessGroup | None = ...,
    async_op: Literal[True],
    check: bool | None = ...,
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
    """The reduction of all ranks' tensors, cut along a dim: to each rank its piece.

    Args:
        x: The same shape on all ranks, any strides; or a list of W pieces, which differ at most
            in `dim`.
        op: As in `all_reduce`.
        dim: The dim that is cut.
        sizes: The pieces' sizes in `dim`; None for equal ones, or for those of a list.
        group: The default group, if None.
        async_op: Return a `Handle`.
        check: Compare with the other ranks first; see `checks`.

    Returns:
        This rank's piece.

    Adjoint: all_gather of the cotangents, then the op's rule as in `all_reduce`.

    Raises:
        ArgumentError: It cannot be cut so, or the op is not defined for the dtype.
        MismatchError: With checks on, ranks disagree.

    Example:
        >>> from gradwire.collectives import reduce_scatter
        >>> def main():
        ...     return reduce_scatter(torch.tensor([1.0, 2.0]) * (dist.get_rank() + 1))
        >>> run_ranks(main, world_size=2)  # of [1, 2] + [2, 4]
        [tensor([3.]), tensor([6.])]
    """
    group = member(group)
    reduction = as_reduction(op)
    numbers = False
    if not isinstance(x, Tensor):
        pieces, dim, numbers = pieces_of(x, dim, group, "x")
        sizes = piece_sizes(pieces, dim, sizes, group)
        x = concat(pieces, dim)
    check_reducible(x, reduction)
    x, reduction = premultiplied(x, reduction)
    front, dim = dim_in_front(x, dim)
    known = None if sizes is None else valid_sizes(sizes, group, "sizes")
    if known is None:
        equal_part(len(front), group, "x")
    elif sum(known) != len(front):
        raise ArgumentError(f"sizes is {list(known)}: x has {len(front)} in dim {dim}")
    elif len(set(known)) == 1:
        known = None
    result = agreed(
        group,
        front,
        check,
        lambda x: consistency.describe(
            "reduce_scatter", x, reduce=reduction, detail=f"dim={dim}, sizes={known}"
        ),
        lambda x, note: reduce_with(ReduceScatter(group, known), x, reduction, note, async_op),
    )
    return after(result, lambda y: y.reshape(()) if numbers else dim_back(y, dim))
