"""Reductions over shared memory: every rank reduces its share of the elements, in rank order.

The other ranks fetch the result, or have it written to their tensors. The data takes the same paths
as in `exchange`: beside the header, in regions, in pieces through the staging slots. Each element
is reduced by one rank, in rank order: all ranks get the same bits, every time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from gradwire.shm.algorithms.arithmetic import reduce_into, reducer
from gradwire.shm.algorithms.exchange import (
    block_start,
    copy_but,
    fill_slot,
    location_for,
    share,
    sync_in_place,
)
from gradwire.shm.algorithms.group_state import GroupState
from gradwire.shm.meeting.regions import USERS
from gradwire.shm.memory.copying import copy, copy_to_all, count_write, overwrites
from gradwire.shm.memory.header import INLINE, PRIVATE, Call, Location

_CACHED_BYTES = 256 << 10
"""Size of pieces that stay in a core's cache from the additions to the copies of the result."""
_UNCUT_BYTES = 4 << 20
"""Maximum size of a share that is not cut: pieces take 1.2 to 1.5 of the time of 2 to 6 MiB."""


def reduce(state: GroupState, call: Call, flat: Tensor) -> None:
    """Reduce `flat` over all ranks, in place: on all ranks, or on the call's root only.

    Args:
        state: State of the group on this rank.
        call: Call of all_reduce, or of reduce with its root.
        flat: 1-d contiguous tensor; ranks other than the root keep their values.
    """
    if flat.nbytes > state.inline_bytes:
        state.announce(call, stage(state, flat))
        reduce_placed(state, call, flat)
        return
    state.announce(call, Location(INLINE), [flat])
    if call.root in (-1, state.rank):
        reduce_into(flat, state.all_inline(flat.dtype, flat.numel()), call.op)


def stage(state: GroupState, flat: Tensor) -> Location:
    """Return the location to announce of data to be reduced, which may be copied there."""
    location = state.locate(flat)
    if location.region == PRIVATE:
        own = share(flat.numel(), state.rank, state.size)
        location = location_for(state, [flat], flat, own, reduces=True)
    return location


def reduce_placed(state: GroupState, call: Call, flat: Tensor) -> None:
    """Run `reduce` for data that is not beside the header, after all ranks have announced it."""
    locations = state.locations()
    first = min(location.region for location in locations)  # PRIVATE < upfront < USERS
    if first == PRIVATE:
        _reduce_through_slots(state, call, flat, gets_result=call.root in (-1, state.rank))
    elif first < USERS:
        _reduce_and_fetch(state, call, locations, flat)
    else:
        _reduce_in_place(state, call, locations, flat)
    if call.root == state.rank:
        count_write(flat)  # other ranks may have written all of it, if its own share is empty


def reduce_scatter(
    state: GroupState,
    call: Call,
    blocks: Sequence[Tensor],
    out: Tensor,
    *,
    base: Tensor | None = None,
) -> None:
    """Set `out` to the reduction of the blocks that all ranks have for this one.

    Args:
        state: State of the group on this rank.
        call: Call with tables of block sizes, or with the size of all blocks.
        blocks: Block of this rank for each rank, 1-d and contiguous.
        out: Tensor like `blocks[rank]`; may be the same tensor.
        base: Contiguous tensor that holds the blocks in order, if there is one.
    """
    start, count, ranks = block_start(call, state.rank), out.numel(), range(state.size)
    if sum(block.nbytes for block in blocks) <= state.inline_bytes:
        state.announce(call, Location(INLINE), blocks)
        reduce_into(out, [state.inline(r, call.dtype, start, count) for r in ranks], call.op)
        return
    # a result that replaces this rank's block may still overlap other blocks
    in_place = out.data_ptr() == blocks[state.rank].data_ptr()
    read = [block for r, block in enumerate(blocks) if r != state.rank or not in_place]
    if overwrites(read, [out], 0, None):
        blocks, base = [block.clone() for block in blocks], None
    own = start, start + count
    state.announce(call, location_for(state, blocks, base, own, reduces=True))
    locations = state.locations()
    if all(location.region >= 0 for location in locations):
        pieces = [
            blocks[r] if r == state.rank else state.at(r, locations[r], call.dtype, start, count)
            for r in ranks
        ]
        for into, *cut in _in_pieces([out, *pieces]):
            reduce_into(into, cut, call.op)
        sync_in_place(state, locations)
    else:
        _reduce_scatter_through_slots(state, call, blocks, out)


def _reduce_scatter_through_slots(
    state: GroupState, call: Call, blocks: Sequence[Tensor], out: Tensor
) -> None:
    """Run reduce_scatter as a pipeline.

    In each step, copy in a piece of the block for every other rank, and reduce an earlier piece of
    this rank's result. A slot has no part for the rank itself, which reads its own block in place.
    """
    rank, parts = state.rank, max(1, state.size - 1)
    slots = [state.slots(r, call.dtype) for r in range(state.size)]
    ring, count = state.ring, out.numel()
    step = ring.slot_bytes // call.dtype.itemsize // parts
    others = [*blocks[:rank], *blocks[rank + 1 :]]
    for fill, now in state.pipeline(
        math.ceil(max(call.sends, default=call.numel) / step), stages=2
    ):
        if fill >= 0:
            lo = fill * step
            fill_slot(
                slots[rank][fill % ring.slots], [block[lo : lo + step] for block in others], step
            )
        lo = now * step
        if 0 <= lo < count:
            target = out[lo : lo + step]
            sources = []
            for r, each in enumerate(slots):
                first = (rank - (rank > r)) * step
                sources.append(each[now % ring.slots][first : first + target.numel()])
            sources[rank] = blocks[rank][lo : lo + step]
            reduce_into(target, sources, call.op)


def _reduce_in_place(
    state: GroupState, call: Call, locations: Sequence[Location], flat: Tensor
) -> None:
    """Reduce this rank's share and write it to all ranks' tensors, which are all in regions."""
    start, stop = share(flat.numel(), state.rank, state.size)
    tensors = [
        flat[start:stop] if r == state.rank else state.at(r, at, flat.dtype, start, stop - start)
        for r, at in enumerate(locations)
    ]
    if call.root >= 0:
        for pieces in _in_pieces(tensors):
            reduce_into(pieces[call.root], pieces, call.op)
    else:
        _reduce_for_all(tensors, call.op)
    state.sync()


def _reduce_for_all(tensors: Sequence[Tensor], op: int) -> None:
    """Set all tensors to their reduction."""
    reduce_pieces, copy_piece = reducer(op, len(tensors)), copy_to_all(tensors[0], tensors[1:])
    start = 0
    for pieces in _in_pieces(tensors):
        result = pieces[0]
        reduce_pieces(result, pieces)
        nbytes = result.nbytes
        copy_piece(start, nbytes)
        start += nbytes


def _in_pieces(tensors: Sequence[Tensor]) -> Sequence[Sequence[Tensor]]:
    """Cut tensors of equal size; return a list of their slices for each piece.

    One call of `split` cuts each tensor: a separate slice costs as much as adding a thousand
    numbers.
    """
    if tensors[0].nbytes <= _UNCUT_BYTES:
        return [tensors]
    step = _CACHED_BYTES // tensors[0].itemsize
    return list(zip(*[tensor.split(step) for tensor in tensors], strict=True))


def _reduce_and_fetch(
    state: GroupState, call: Call, locations: Sequence[Location], flat: Tensor
) -> None:
    """Reduce this rank's share into shared memory; after a barrier, fetch the other ranks' shares.

    The share is written to this rank's shared copy, or to the root's. A rank reads its own share
    from its tensor: no other rank needs it.
    """
    rank, count, dtype = state.rank, flat.numel(), flat.dtype
    start, stop = share(count, rank, state.size)
    sources = [
        flat[start:stop] if r == rank else state.at(r, at, dtype, start, stop - start)
        for r, at in enumerate(locations)
    ]
    own = locations[rank]
    shown = state.own_upfront(dtype, own)[:count] if own.region < USERS else flat
    result = shown[start:stop] if call.root in (-1, rank) else sources[call.root]
    reduce_into(result, sources, call.op)
    if call.root < 0:
        copy(sources[rank], result)
    state.sync()
    if call.root == rank:
        copy(flat, shown)
    if call.root < 0:
        for r, location in enumerate(locations):
            start, stop = share(count, r, state.size)
            if r != rank and start < stop:
                copy(flat[start:stop], state.at(r, location, dtype, start, stop - start))
        sync_in_place(state, locations)


def _reduce_through_slots(
    state: GroupState, call: Call, flat: Tensor, *, gets_result: bool
) -> None:
    """Reduce as a pipeline.

    In each step, copy a piece in, reduce this rank's share of an earlier piece, and copy a still
    earlier one out. A rank reads its own share from its tensor: no other rank needs it.
    """
    rank, size = state.rank, state.size
    slots = [state.slots(r, flat.dtype) for r in range(size)]
    ring = state.ring
    pieces = flat.split(ring.slot_bytes // flat.dtype.itemsize)
    for fill, now, fetch in state.pipeline(len(pieces), stages=3):
        if fill >= 0:
            copy_but(
                share(len(pieces[fill]), rank, size), pieces[fill], slots[rank][fill % ring.slots]
            )
        if now >= 0:
            start, stop = share(len(pieces[now]), rank, size)
            if start < stop:
                sources = [slots[r][now % ring.slots][start:stop] for r in range(size)]
                result, sources[rank] = sources[rank], pieces[now][start:stop]
                reduce_into(result, sources, call.op)
                if gets_result:
                    copy(sources[rank], result)
        if fetch >= 0 and gets_result:
            for r in range(size):
                start, stop = share(len(pieces[fetch]), r, size)
                if r != rank and start < stop:
                    copy(pieces[fetch][start:stop], slots[r][fetch % ring.slots][start:stop])
