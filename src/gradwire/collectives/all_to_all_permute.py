"""all_to_all, ppermute, shift and halo_exchange, whose adjoints send in the opposite direction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypedDict, Unpack, overload

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from gradwire.collectives import consistency, wire
from gradwire.collectives.consistency import CallSignature, tensor_fields
from gradwire.collectives.operation import (
    Async,
    Handle,
    Operation,
    Peers,
    Plan,
    Sync,
    concat,
    register_plan,
    unstack,
)
from gradwire.collectives.validation import (
    check_dense,
    equal_sizes,
    move_back,
    move_to_front,
    pieces_of,
    resolve_group,
    sizes_of_split,
    valid_dim,
    valid_sizes,
)
from gradwire.errors import ArgumentError, ArgumentTypeError


@register_plan
@dataclass(frozen=True)
class AllToAll(Plan):
    """Exchange of rows between all ranks; equal numbers if the splits are None."""

    # Both splits are given, or neither.
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
    send: tuple[int, ...] | None
    if isinstance(x, Tensor):
        rows, dim = move_to_front(x, split_dim)
        out_dim = valid_dim(split_dim if concat_dim is None else concat_dim, rows.dim(), x.shape)
        split = sizes_of_split(input_splits, rows, dim, group, names=("input_splits", "x"))
        send = None if input_splits is None and output_splits is None else split
        if out_dim != dim and output_splits is not None:
            raise ArgumentError("output_splits is given, and concat_dim is not split_dim: omit one")
        detail = f"split_dim={dim}, concat_dim={out_dim}, splits given={send is not None}"

        def finish(plan: AllToAll, y: Tensor) -> Any:
            return move_back(y, dim) if out_dim == dim else _concatenated(plan, y, dim, out_dim)

    else:
        if input_splits is not None or split_dim or concat_dim:
            raise ArgumentError(
                f"input_splits is {input_splits}, split_dim {split_dim}, concat_dim {concat_dim}: "
                "the tensors of a list are sent unchanged; omit these"
            )
        pieces, _, scalars = pieces_of(x, 0, group, "x")
        rows, detail = concat(pieces), "list"
        send = tuple(len(piece) for piece in pieces)

        def finish(plan: AllToAll, y: Tensor) -> Any:
            assert plan.output_splits is not None
            return unstack(y, plan.output_splits, scalars)

    sends = send or equal_sizes(rows.shape[0], group, "x")
    receive = None
    if output_splits is not None:
        receive = valid_sizes(output_splits, group, "output_splits")

    def plan_of(rows: Tensor, peers: Peers) -> AllToAll:
        if peers is None:
            known = receive
            if send is not None and receive is None:
                known = tuple(wire.exchange_ints(send, group))
            return AllToAll(group, send, known)
        # Ranks may have different numbers of rows without splits, too.
        if send is None and all(peer.send == peers[0].send for peer in peers):
            return AllToAll(group)
        return AllToAll(group, sends, tuple(peer.send[group.rank()] for peer in peers))

    def signature() -> CallSignature:
        fields, came = tensor_fields(rows), receive or ()
        return CallSignature(
            "all_to_all", *fields, detail=detail, ragged=True, send=sends, receive=came
        )

    return Operation(rows, group, signature, plan_of, finish).run(check, async_op)


def _concatenated(plan: AllToAll, y: Tensor, split_dim: int, concat_dim: int) -> Tensor:
    """Concatenate the received pieces along another dim than the one that was split."""
    world = plan.group.size()
    # A list of sizes, because split(0) returns a single piece.
    pieces = y.split(list(plan.output_splits or [y.shape[0] // world] * world))
    return torch.cat([piece.movedim(0, split_dim) for piece in pieces], concat_dim)


@register_plan
@dataclass(frozen=True)
class Permute(Plan):
    """Tensors sent along (source, destination) pairs; zeros on ranks that receive nothing."""

    pairs: tuple[tuple[int, int], ...]
    name = "ppermute"

    def start(self, x: Tensor, blocking: bool = False) -> wire.Pending:
        if x.numel() == 0:
            return wire.done(wire.contiguous_copy(x))
        rank, world = self.group.rank(), self.group.size()
        send, receive = [0] * world, [0] * world
        for source, destination in self.pairs:
            if source == rank:
                send[destination] = 1
            if destination == rank:
                receive[source] = 1
        row = x.unsqueeze(0)
        pending = wire.all_to_all(row[: sum(send)], send, receive, self.group, blocking)

        def finish() -> Tensor:
            rows = pending.wait()
            if len(rows):
                # `.data`, because a view could not be modified in place: autograd does not know its
                # base.
                return rows[0].data
            return wire.zeros_like(x)

        return wire.Pending((), finish)

    def adjoint(self) -> Permute:
        pairs = tuple((destination, source) for source, destination in self.pairs)
        return Permute(self.group, pairs)


@overload
def ppermute(x: Tensor, pairs: Sequence[tuple[int, int]], **options: Unpack[Sync]) -> Tensor: ...
@overload
def ppermute(
    x: Tensor, pairs: Sequence[tuple[int, int]], **options: Unpack[Async]
) -> Handle[Tensor]: ...
def ppermute(
    x: Tensor,
    pairs: Sequence[tuple[int, int]],
    *,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    check: bool | None = None,
) -> Any:
    """Send tensors between ranks according to (source, destination) pairs.

    Args:
        x: Tensor of the same shape on all ranks, of any dtype and strides.
        pairs: Pairs of ranks in the group, the same on every rank. No source and no destination may
            occur twice.
        group: Process group; the default group if None.
        async_op: True to return a `Handle`.
        check: True to compare the call with the other ranks first; see `checks`.

    Returns:
        The source's tensor; zeros on a rank that is not a destination.

    Adjoint: the inverse pairs.

    Raises:
        ArgumentTypeError: `pairs` is not a list of pairs.
        ArgumentError: A source or destination occurs twice, or is not in the group.
        MismatchError: With checks on, the ranks disagree.

    Example:
        >>> from gradwire.collectives import ppermute
        >>> def main():
        ...     return ppermute(torch.tensor([dist.get_rank() + 1.0]), [(0, 1)])
        >>> run_ranks(main, world_size=2)
        [tensor([0.]), tensor([1.])]
    """
    group = resolve_group(group)
    try:
        moves = tuple((int(source), int(target)) for source, target in pairs)
    except (TypeError, ValueError) as error:
        raise ArgumentTypeError(
            f"pairs is {pairs!r}: give a list of (source, destination), ranks in the group"
        ) from error
    world = group.size()
    for name, ranks in (("source", [s for s, _ in moves]), ("destination", [t for _, t in moves])):
        if len(set(ranks)) < len(ranks):
            raise ArgumentError(f"pairs is {list(moves)}: a {name} occurs twice")
        if any(not 0 <= rank < world for rank in ranks):
            raise ArgumentError(
                f"pairs is {list(moves)}: a {name} is not in the group; give ranks 0 to {world - 1}"
            )
    return _permuted(x, moves, "ppermute", group, async_op, check)


@overload
def shift(x: Tensor, k: int = ..., *, wrap: bool = ..., **options: Unpack[Sync]) -> Tensor: ...
@overload
def shift(
    x: Tensor, k: int = ..., *, wrap: bool = ..., **options: Unpack[Async]
) -> Handle[Tensor]: ...
def shift(
    x: Tensor,
    k: int = 1,
    *,
    wrap: bool = True,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    check: bool | None = None,
) -> Any:
    """Send each rank's tensor to the rank whose index is larger by k.

    Args:
        x: Tensor of the same shape on all ranks, of any dtype and strides.
        k: Number of ranks by which to shift; may be negative.
        wrap: True if the first rank follows the last; otherwise zeros are shifted in.
        group: Process group; the default group if None.
        async_op: True to return a `Handle`.
        check: True to compare the call with the other ranks first; see `checks`.

    Returns:
        The tensor of the rank whose index is smaller by k.

    Adjoint: the shift by -k.

    Raises:
        ArgumentTypeError: k is not an int.
        MismatchError: With checks on, the ranks disagree.

    Example:
        >>> from gradwire.collectives import shift
        >>> def main():
        ...     x = torch.tensor([dist.get_rank() + 1.0])
        ...     return shift(x).item(), shift(x, wrap=False).item()
        >>> run_ranks(main, world_size=3)
        [(3.0, 0.0), (1.0, 1.0), (2.0, 2.0)]
    """
    group = resolve_group(group)
    if not isinstance(k, int):
        raise ArgumentTypeError(f"k is {k!r}: give an int")
    world = group.size()
    moves = [(rank, (rank + k) % world) for rank in range(world) if wrap or 0 <= rank + k < world]
    return _permuted(x, tuple(moves), "shift", group, async_op, check)


def _permuted(
    x: Tensor,
    moves: tuple[tuple[int, int], ...],
    name: str,
    group: ProcessGroup,
    async_op: bool,
    check: bool | None,
) -> Any:
    check_dense(x)
    plan = Permute(group, moves)

    def signature() -> CallSignature:
        return CallSignature(name, *tensor_fields(x), detail=f"pairs={moves}")

    return Operation(x, group, signature, lambda x, peers: plan).run(check, async_op)


def halo_exchange(
    x: Tensor,
    widths: int | tuple[int, int],
    dim: int = 0,
    *,
    wrap: bool = False,
    group: ProcessGroup | None = None,
    check: bool | None = None,
) -> Tensor:
    """Pad this rank's slab with the edges of its neighbours' slabs.

    Args:
        x: Slab of this rank, of an array that is divided along `dim` in rank order. Sizes in `dim`
            may differ between ranks, but must be at least the widths.
        widths: Widths of the edges from the previous and the next rank, or one number for both; the
            same on every rank.
        dim: Dim along which the array is divided.
        wrap: True if the first and the last rank are neighbours; otherwise zeros are padded.
        group: Process group; the default group if None.
        check: True to compare the call with the other ranks first; see `checks`.

    Returns:
        The slab, enlarged by both widths in `dim`.

    Adjoint: the cotangents of the edges are added to those of the slabs that they came from.

    Raises:
        ArgumentTypeError: `widths` is not one number or two.
        ArgumentError: A width is negative or exceeds the slab's size; with checks on, the size of
            any rank's slab.
        MismatchError: With checks on, the ranks disagree.

    Example:
        >>> from gradwire.collectives import halo_exchange
        >>> def main():
        ...     x = torch.tensor([1.0, 2.0]) + 10 * dist.get_rank()
        ...     return halo_exchange(x, 1).tolist()
        >>> run_ranks(main, world_size=2)
        [[0.0, 1.0, 2.0, 11.0], [2.0, 11.0, 12.0, 0.0]]
    """
    group = resolve_group(group)
    check_dense(x)
    dim = valid_dim(dim, x.dim(), x.shape)
    pair = (widths, widths) if isinstance(widths, int) else widths
    match pair:
        case (int(before), int(after)):
            if min(before, after) < 0:
                raise ArgumentError(f"widths is {widths}: give numbers ≥ 0")
        case _:
            raise ArgumentTypeError(f"widths is {widths!r}: give one int, or a tuple of two")
    size = x.shape[dim]
    sizes = {group.rank(): size}
    if consistency.requested(check):
        call = CallSignature(
            "halo_exchange",
            *tensor_fields(x.movedim(dim, 0)),
            detail=f"widths={(before, after)}, dim={dim}, wrap={wrap}",
            ragged=True,
            send=(size,) * group.size(),
        )
        x, _, peers = consistency.agree(group, x, call)
        sizes = {rank: peer.send[0] for rank, peer in enumerate(peers)}
    for rank, its_size in sizes.items():
        if max(before, after) > its_size:
            raise ArgumentError(
                f"widths is {widths}: x has size {its_size} in dim {dim} on rank {rank} of the "
                "group; give widths that do not exceed any slab"
            )
    options: dict[str, Any] = {"wrap": wrap, "group": group, "check": check}
    parts = [x]
    if before:
        parts.insert(0, shift(x.narrow(dim, size - before, before), 1, **options))
    if after:
        parts.append(shift(x.narrow(dim, 0, after), -1, **options))
    return concat(parts, dim)
