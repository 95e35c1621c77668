"""all_to_all, whose adjoint is an all_to_all with splits and dims swapped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypedDict, overload

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from gradwire.collectives import wire
from gradwire.collectives.arguments import (
    equal_sizes,
    move_back,
    move_to_front,
    pieces_of,
    resolve_group,
    sizes_of_split,
    valid_dim,
    valid_sizes,
)
from gradwire.collectives.autograd import concat, unstack
from gradwire.collectives.consistency import tensor_fields
from gradwire.collectives.handles import Async, Handle, Sync
from gradwire.collectives.linear_collective import LinearCollective, register_plan
from gradwire.collectives.operation import Operation, Peers
from gradwire.collectives.signature import CallSignature
from gradwire.errors import ArgumentError

if TYPE_CHECKING:
    from typing_extensions import Unpack


@register_plan
@dataclass(frozen=True)
class AllToAll(LinearCollective):
    """Exchange of rows between all ranks; equal numbers if the splits are None.

    Both splits are given, or neither. Without splits, the result has as many rows as the input.
    """

    input_splits: tuple[int, ...] | None = None
    output_splits: tuple[int, ...] | None = None
    name = "all_to_all"

    def start(self, x: Tensor, blocking: bool = False) -> wire.Pending:
        return wire.all_to_all(x, self.input_splits, self.output_splits, self.group, blocking)

    def adjoint(self) -> AllToAll:
        return AllToAll(self.group, self.output_splits, self.input_splits)

    def rows(self, rows: int) -> int:
        return rows if self.output_splits is None else sum(self.output_splits)


class _Splits(TypedDict, total=False):
    input_splits: Sequence[int] | None
    output_splits: Sequence[int] | None
    split_dim: int
    concat_dim: int | None


class _Sync(_Splits, Sync):
    pass


class _Async(_Splits, Async):
    pass


@overload
def all_to_all(x: Tensor, **options: Unpack[_Sync]) -> Tensor: ...
@overload
def all_to_all(x: Tensor, **options: Unpack[_Async]) -> Handle[Tensor]: ...
@overload
def all_to_all(x: Sequence[Tensor], **options: Unpack[_Sync]) -> tuple[Tensor, ...]: ...
@overload
def all_to_all(x: Sequence[Tensor], **options: Unpack[_Async]) -> Handle[tuple[Tensor, ...]]: ...
def all_to_all(
    x: Tensor | Sequence[Tensor],
    *,
    input_splits: Sequence[int] | None = None,
    output_splits: Sequence[int] | None = None,
    split_dim: int = 0,
    concat_dim: int | None = None,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    check: bool | None = None,
) -> Any:
    """Split a tensor, send one piece to each rank, and concatenate the pieces received.

    Args:
        x: Tensor to split along `split_dim`, or a list with a tensor for each rank, of any dtype
            and strides. The tensors of a list may differ in the first dim, and are sent unchanged:
            of the next four arguments, only `output_splits` is allowed with a list.
        input_splits: Sizes to send to each rank, in `split_dim`; None for equal ones.
        output_splits: Sizes received from each rank. If it is None, and `input_splits` is given or
            `x` is a list, the ranks exchange them first.
        split_dim: Dim to split.
        concat_dim: Dim along which to concatenate the received pieces; `split_dim` if None.
        group: Process group; the default group if None.
        async_op: True to return a `Handle`.
        check: True to compare the call with the other ranks first; see `checks`.

    Returns:
        The pieces received from rank 0, 1, …, concatenated along `concat_dim`. If `x` is a list, a
        tuple of tensors that share one block of memory: `clone()` those that are kept or saved.

    Adjoint: all_to_all with splits and dims swapped.

    Raises:
        ArgumentError: The splits do not sum to the size, or the tensor does not have the dim.
        MismatchError: With checks on, the ranks disagree.

    Example:
        >>> from gradwire.collectives import all_to_all
        >>> def main():
        ...     return all_to_all(torch.tensor([1, 2]) + 10 * dist.get_rank())
        >>> run_ranks(main, world_size=2)  # rank 0 has [1, 2], rank 1 has [11, 12]
        [tensor([ 1, 11]), tensor([ 2, 12])]
    """
    group = resolve_group(group)
    if not isinstance(x, Tensor):
        if input_splits is not None or split_dim or concat_dim:
            raise ArgumentError(
                f"input_splits is {input_splits}, split_dim {split_dim}, concat_dim {concat_dim}: "
                "the tensors of a list are sent unchanged; omit these"
            )
        return _exchange_list(x, output_splits, group, async_op, check)
    out_dim = split_dim if concat_dim is None else concat_dim
    front, split_dim = move_to_front(x, split_dim)
    out_dim = valid_dim(out_dim, front.dim(), x.shape)
    names = ("input_splits", "x")
    split = sizes_of_split(input_splits, front, split_dim, group, names=names)
    send = None if input_splits is None and output_splits is None else split
    if out_dim != split_dim and output_splits is not None:
        raise ArgumentError("output_splits is given, and concat_dim is not split_dim: omit one")
    detail = f"split_dim={split_dim}, concat_dim={out_dim}, splits given={send is not None}"
    operation = _exchange(front, group, send, output_splits, detail)
    if out_dim == split_dim:
        operation.finish = lambda _, y: move_back(y, split_dim)
    else:
        operation.finish = lambda plan, y: _concatenated(plan, y, split_dim, out_dim)
    return operation.run(check, async_op)


def _concatenated(plan: AllToAll, y: Tensor, split_dim: int, concat_dim: int) -> Tensor:
    """Concatenate the received pieces along another dim than the one that was split."""
    world = plan.group.size()
    # A list of sizes, because split(0) returns a single piece.
    pieces = y.split(list(plan.output_splits or [y.shape[0] // world] * world))
    return torch.cat([piece.movedim(0, split_dim) for piece in pieces], concat_dim)


def _exchange(
    rows: Tensor,
    group: ProcessGroup,
    send: tuple[int, ...] | None,
    output_splits: Sequence[int] | None,
    detail: str,
) -> Operation:
    """Return the operation that exchanges rows; `send` is None if the caller gave no splits."""
    sends = send or equal_sizes(rows.shape[0], group, "x")
    receive = None
    if output_splits is not None:
        receive = valid_sizes(output_splits, group, "output_splits")

    def plan(rows: Tensor, peers: Peers) -> AllToAll:
        if peers is None:
            known = receive
            if send is not None and receive is None:
                known = tuple(wire.exchange_ints(send, group))
            return AllToAll(group, send, known)
        # Ranks may have different numbers of rows without splits, too.
        if send is None and all(peer.send == peers[0].send for peer in peers):
            return AllToAll(group)
        return AllToAll(group, sends, tuple(peer.send[group.rank()] for peer in peers))

    return Operation(
        rows,
        group,
        lambda: CallSignature(
            "all_to_all",
            *tensor_fields(rows),
            detail=detail,
            ragged=True,
            send=sends,
            receive=receive or (),
        ),
        plan,
    )


def _exchange_list(
    xs: Sequence[Tensor],
    output_splits: Sequence[int] | None,
    group: ProcessGroup,
    async_op: bool,
    check: bool | None,
) -> Any:
    pieces, _, scalars = pieces_of(xs, 0, group, "x")
    send = tuple(len(piece) for piece in pieces)
    operation = _exchange(concat(pieces), group, send, output_splits, "list")
    operation.finish = lambda plan, y: unstack(y, plan.output_splits, scalars)
    return operation.run(check, async_op)
