"""The collectives over shared memory; they know nothing of torch.distributed's process groups.

There are two ideas. *Exchange*: every rank has a block for each other rank, or one for all, which
the others fetch. *Reduction*: every rank owns a share of the elements, reduces it in the order of
the ranks, and the others fetch or are given the result. Each comes in three sizes: short data
travels with the header (one wait), data in regions is used where it lies, and all else passes in
pieces through the staging slots, so that copying in, reducing and copying out overlap between
ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire.shm.arithmetic import reduce_into
from gradwire.shm.header import INLINE, NOWHERE, Call, Place
from gradwire.shm.sync import Deadline
from gradwire.shm.team import INLINE_BYTES, Team
from gradwire.shm.tensors import overwritten

__all__ = ["barrier", "broadcast", "exchange", "reduce", "reduce_scatter"]

_PIECE_BYTES = 256 << 10  # shorter pieces cost more in waits than they gain in cache
_LINE = 64  # elements; shares end between cache lines


def barrier(team: Team, deadline: Deadline, kind: str = "barrier") -> None:
    """Wait until every rank has called."""
    team.announce(Call(kind), Place(INLINE), deadline)


def reduce(team: Team, call: Call, flat: Tensor, deadline: Deadline) -> None:
    """Reduce `flat` over all ranks, in place: on all of them, or on the call's root only.

    Args:
        team: The group.
        call: all_reduce, or reduce with its root.
        flat: 1-d and contiguous; other ranks than the root keep their values.
        deadline: When to give up.
    """
    gets_result = call.root in (-1, team.rank)
    if flat.nbytes <= INLINE_BYTES:
        team.announce(call, Place(INLINE), deadline, [flat])
        if gets_result:
            pieces = [team.inline(r, flat.dtype, 0, flat.numel()) for r in range(team.size)]
            reduce_into(flat, pieces, call.op)
        return
    team.announce(call, _place(team, flat, flat.nbytes), deadline)
    places = team.places()
    if all(p.region >= 0 for p in places):
        _reduce_where_it_lies(team, call, places, flat)
    else:
        _reduce_through_slots(team, call, flat, gets_result=gets_result)


def broadcast(team: Team, call: Call, flat: Tensor, deadline: Deadline) -> None:
    """Give the root's values to all ranks, which share the copying where memory is shared.

    Args:
        team: The group.
        call: broadcast, with its root.
        flat: 1-d and contiguous.
        deadline: When to give up.
    """
    at_root, count = team.rank == call.root, flat.numel()
    outgoing = [flat] if at_root else []
    incoming = [flat if r == call.root and not at_root else None for r in range(team.size)]
    if flat.nbytes <= INLINE_BYTES:
        exchange(team, call, outgoing, incoming, deadline, shared=True)
        return
    team.announce(call, _place(team, flat, flat.nbytes, sends=at_root), deadline)
    places = team.places()
    if places[call.root].region == NOWHERE:
        calls = [call] * team.size
        _exchange_through_slots(team, call, calls, [call.root], outgoing, incoming, shared=True)
        return
    # the root writes the first of as many parts as there are ranks, a receiver fetches the rest
    first = _share(count, 0, team.size)[1]
    if at_root:
        for rank, place in enumerate(places):
            if rank != team.rank and place.region >= 0:
                team.at(rank, place, flat.dtype, 0, first).copy_(flat[:first])
    else:
        start = first if places[team.rank].region >= 0 else 0
        source = team.at(call.root, places[call.root], flat.dtype, start, count - start)
        flat[start:].copy_(source)
    team.sync()


def exchange(
    team: Team,
    call: Call,
    outgoing: Sequence[Tensor],
    incoming: Sequence[Tensor | None],
    deadline: Deadline,
    *,
    base: Tensor | None = None,
    shared: bool = False,
) -> None:
    """Every rank fetches from every other rank the block that is meant for it.

    Args:
        team: The group.
        call: With tables of block sizes, or with the one size that all blocks have.
        outgoing: This rank's block for each rank; or one for all, if `shared`; or nothing.
        incoming: Where each rank's block goes, 1-d and contiguous; None where there is none. What
            lies over outgoing blocks costs a copy of these.
        deadline: When to give up.
        base: A contiguous tensor that holds the outgoing blocks in order, where there is one.
        shared: Whether a rank's one block goes to all ranks.
    """
    own = outgoing[0 if shared else team.rank] if outgoing else None
    if (total := sum(block.nbytes for block in outgoing)) > INLINE_BYTES:
        if overwritten(outgoing, incoming, team.rank, own):
            outgoing, base = [block.clone() for block in outgoing], None
            own = outgoing[0 if shared else team.rank]
        team.announce(call, _place(team, base, total), deadline)
    else:
        team.announce(call, Place(INLINE), deadline, outgoing)
    places = team.places()
    calls = team.calls() if call.sends else [call] * team.size
    if own is not None:
        _copy(incoming[team.rank], own)
    staged = []
    for rank, (its_place, its_call) in enumerate(zip(places, calls, strict=True)):
        target = incoming[rank]
        if its_place.region == NOWHERE:
            staged.append(rank)
        elif rank != team.rank and target is not None:
            start = 0 if shared else _start(its_call, team.rank)
            count = target.numel()
            if its_place.region == INLINE:
                target.copy_(team.inline(rank, call.dtype, start, count))
            else:
                target.copy_(team.at(rank, its_place, call.dtype, start, count))
    if staged:
        _exchange_through_slots(team, call, calls, staged, outgoing, incoming, shared=shared)
    if any(p.region >= 0 for p in places):
        team.sync()  # until then others read this rank's tensors


def _place(team: Team, base: Tensor | None, nbytes: int, *, sends: bool = True) -> Place:
    """Where this rank's data lies; if in no region, there is a place for it to pass through."""
    place = Place(NOWHERE) if base is None else team.locate(base)
    return team.nowhere(nbytes, sends=sends) if place.region == NOWHERE else place


def _copy(target: Tensor | None, source: Tensor) -> None:
    if target is not None and target.data_ptr() != source.data_ptr():
        target.copy_(source)


def _start(call: Call, rank: int) -> int:
    """The first element of the block for `rank` among a rank's blocks."""
    return sum(call.sends[:rank]) if call.sends else rank * call.numel


def _exchange_through_slots(
    team: Team,
    call: Call,
    calls: Sequence[Call],
    staged: Sequence[int],
    outgoing: Sequence[Tensor],
    incoming: Sequence[Tensor | None],
    *,
    shared: bool,
) -> None:
    columns = 1 if shared else max(1, team.size - 1)  # none for the rank itself
    longest = max(max(calls[rank].sends, default=call.numel) for rank in staged)
    ring, total = team.ring, longest * columns * call.dtype.itemsize
    # short messages in two pieces at least, if there are slots for both, so that copies overlap
    step = (
        min(ring.slot_bytes, max(_PIECE_BYTES, total // min(2, ring.slots)))
        // call.dtype.itemsize
        // columns
    )
    slots = {rank: team.slots(rank, call.dtype) for rank in staged}
    others = outgoing if shared else [*outgoing[: team.rank], *outgoing[team.rank + 1 :]]
    for fill, fetch in team.turns(math.ceil(longest / step), stages=2):
        if team.rank in staged and fill >= 0:
            lo = fill * step
            slot = slots[team.rank][fill % ring.slots]
            _fill(slot, [block[lo : lo + step] for block in others], step)
        lo = fetch * step
        for rank in staged:
            target = incoming[rank]
            if rank != team.rank and target is not None and 0 <= lo < target.numel():
                piece, slot = target[lo : lo + step], slots[rank][fetch % ring.slots]
                column = 0 if shared else team.rank - (rank < team.rank)
                piece.copy_(slot[column * step :][: piece.numel()])


def _fill(slot: Tensor, pieces: Sequence[Tensor], step: int) -> None:
    """Put each piece into its column of a slot."""
    for i, piece in enumerate(pieces):
        if piece.numel():
            slot[i * step :][: piece.numel()].copy_(piece)


def reduce_scatter(
    team: Team,
    call: Call,
    blocks: Sequence[Tensor],
    out: Tensor,
    deadline: Deadline,
    *,
    base: Tensor | None = None,
) -> None:
    """Set `out` to the reduction of the blocks that all ranks have for this one.

    Args:
        team: The group.
        call: With tables of block sizes, or with the one size that all blocks have.
        blocks: One for each rank, 1-d and contiguous.
        out: Like `blocks[rank]`, which it may be.
        deadline: When to give up.
        base: A contiguous tensor that holds the blocks in order, where there is one.
    """
    start, count, ranks = _start(call, team.rank), out.numel(), range(team.size)
    if (total := sum(block.nbytes for block in blocks)) <= INLINE_BYTES:
        team.announce(call, Place(INLINE), deadline, blocks)
        reduce_into(out, [team.inline(r, call.dtype, start, count) for r in ranks], call.op)
        return
    results = [out if r == team.rank else None for r in ranks]
    if overwritten(blocks, results, team.rank, blocks[team.rank]):
        blocks, base = [block.clone() for block in blocks], None
    team.announce(call, _place(team, base, total), deadline)
    places = team.places()
    if all(p.region >= 0 for p in places):
        pieces = [
            blocks[r] if r == team.rank else team.at(r, places[r], call.dtype, start, count)
            for r in ranks
        ]
        step = _PIECE_BYTES // call.dtype.itemsize
        for into, *cut in zip(*[p.split(step) for p in (out, *pieces)], strict=True):
            reduce_into(into, cut, call.op)
        team.sync()
        return
    slots = [team.slots(r, call.dtype) for r in ranks]
    ring = team.ring
    step = ring.slot_bytes // call.dtype.itemsize // team.size
    longest, first = max(call.sends, default=call.numel), team.rank * step
    for fill, now in team.turns(math.ceil(longest / step), stages=2):
        if fill >= 0:
            lo = fill * step
            slot = slots[team.rank][fill % ring.slots]
            _fill(slot, [block[lo : lo + step] for block in blocks], step)
        lo = now * step
        if 0 <= lo < count:
            target = out[lo : lo + step]
            last = first + target.numel()
            sources = [slots[r][now % ring.slots][first:last] for r in ranks]
            reduce_into(target, sources, call.op)


def _share(count: int, rank: int, size: int) -> tuple[int, int]:
    """The elements that a rank reduces: all shares together are 0 to `count`."""
    each = math.ceil(count / size / _LINE) * _LINE
    return min(rank * each, count), min((rank + 1) * each, count)


def _reduce_where_it_lies(team: Team, call: Call, places: Sequence[Place], flat: Tensor) -> None:
    count, dtype = flat.numel(), flat.dtype
    tensors = [
        flat if r == team.rank else team.at(r, places[r], dtype, 0, count) for r in range(team.size)
    ]
    start, stop = _share(count, team.rank, team.size)
    step = _PIECE_BYTES // dtype.itemsize
    # cut at once: a slice costs as much as adding a thousand numbers
    for pieces in zip(*[t[start:stop].split(step) for t in tensors], strict=True):
        if call.root < 0:
            reduce_into(pieces[0], pieces, call.op)
            for piece in pieces[1:]:
                piece.copy_(pieces[0])
        else:
            reduce_into(pieces[call.root], pieces, call.op)
    team.sync()


def _reduce_through_slots(team: Team, call: Call, flat: Tensor, *, gets_result: bool) -> None:
    """In each turn: copy a piece in, reduce one from before, copy one from before that out."""
    size, dtype = team.size, flat.dtype
    slots = [team.slots(r, dtype) for r in range(size)]
    ring = team.ring
    step = ring.slot_bytes // dtype.itemsize
    pieces = flat.split(step)
    spare = None if gets_result else torch.empty(len(pieces[0]), dtype=dtype, device="cpu")
    for fill, now, fetch in team.turns(len(pieces), stages=3):
        if fill >= 0:
            slots[team.rank][fill % ring.slots][: len(pieces[fill])].copy_(pieces[fill])
        if now >= 0:
            start, stop = _share(len(pieces[now]), team.rank, size)
            if start < stop:
                result = (pieces[now] if spare is None else spare)[start:stop]
                sources = [slots[r][now % ring.slots][start:stop] for r in range(size)]
                reduce_into(result, sources, call.op)
                sources[team.rank].copy_(result)
        if fetch >= 0 and gets_result:
            for r in range(size):
                start, stop = _share(len(pieces[fetch]), r, size)
                if r != team.rank and start < stop:
                    pieces[fetch][start:stop].copy_(slots[r][fetch % ring.slots][start:stop])
