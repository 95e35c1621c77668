"""Reductions over shared memory: every rank reduces its share of the elements, in rank order.

The other ranks fetch the result, or have it written to their tensors. The three paths are those of
`exchange`: with the header, in place in regions, in pieces through the staging slots. Each element
is reduced by one rank alone and in the order of the ranks: all ranks get the same bits, every time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire.shm.arithmetic import reduce_into
from gradwire.shm.group_segment import INLINE_BYTES
from gradwire.shm.group_state import GroupState
from gradwire.shm.header import INLINE, Call, Location
from gradwire.shm.pieces import PIECE_BYTES, block_start, fill_slot, location_for, share
from gradwire.shm.tensors import overwrites

__all__ = ["reduce", "reduce_scatter"]


def reduce(state: GroupState, call: Call, flat: Tensor) -> None:
    """Reduce `flat` over all ranks, in place: on all of them, or on the call's root only.

    Args:
        state: This rank's state of the group.
        call: all_reduce, or reduce with its root.
        flat: 1-d and contiguous; other ranks than the root keep their values.
    """
    gets_result = call.root in (-1, state.rank)
    if flat.nbytes <= INLINE_BYTES:
        state.announce(call, Location(INLINE), [flat])
        if gets_result:
            pieces = [state.inline(r, flat.dtype, 0, flat.numel()) for r in range(state.size)]
            reduce_into(flat, pieces, call.op)
        return
    state.announce(call, location_for(state, flat, flat.nbytes))
    locations = state.locations()
    if all(location.region >= 0 for location in locations):
        _reduce_in_place(state, call, locations, flat)
    else:
        _reduce_through_slots(state, call, flat, gets_result=gets_result)


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
        state: This rank's state of the group.
        call: With tables of block sizes, or with the one size that all blocks have.
        blocks: This rank's block for each rank, 1-d and contiguous.
        out: Like `blocks[rank]`, which it may be.
        base: A contiguous tensor that holds the blocks in order, if there is one.
    """
    start, count, ranks = block_start(call, state.rank), out.numel(), range(state.size)
    if (total := sum(block.nbytes for block in blocks)) <= INLINE_BYTES:
        state.announce(call, Location(INLINE), blocks)
        reduce_into(out, [state.inline(r, call.dtype, start, count) for r in ranks], call.op)
        return
    results = [out if r == state.rank else None for r in ranks]
    if overwrites(blocks, results, state.rank, blocks[state.rank]):
        blocks, base = [block.clone() for block in blocks], None
    state.announce(call, location_for(state, base, total))
    locations = state.locations()
    if all(location.region >= 0 for location in locations):
        pieces = [
            blocks[r] if r == state.rank else state.at(r, locations[r], call.dtype, start, count)
            for r in ranks
        ]
        step = PIECE_BYTES // call.dtype.itemsize
        for into, *cut in zip(*[p.split(step) for p in (out, *pieces)], strict=True):
            reduce_into(into, cut, call.op)
        state.sync()
    else:
        _reduce_scatter_through_slots(state, call, blocks, out)


def _reduce_scatter_through_slots(
    state: GroupState, call: Call, blocks: Sequence[Tensor], out: Tensor
) -> None:
    """In each step: copy a piece of every block in, reduce an earlier piece of this rank's."""
    slots = [state.slots(r, call.dtype) for r in range(state.size)]
    ring, count = state.ring, out.numel()
    step = ring.slot_bytes // call.dtype.itemsize // state.size
    longest, first = max(call.sends, default=call.numel), state.rank * step
    for fill, now in state.pipeline(math.ceil(longest / step), stages=2):
        if fill >= 0:
            lo = fill * step
            slot = slots[state.rank][fill % ring.slots]
            fill_slot(slot, [block[lo : lo + step] for block in blocks], step)
        lo = now * step
        if 0 <= lo < count:
            target = out[lo : lo + step]
            last = first + target.numel()
            sources = [each[now % ring.slots][first:last] for each in slots]
            reduce_into(target, sources, call.op)


def _reduce_in_place(
    state: GroupState, call: Call, locations: Sequence[Location], flat: Tensor
) -> None:
    """All ranks' tensors lie in regions: reduce this rank's share, and write it to all of them."""
    count, dtype = flat.numel(), flat.dtype
    tensors = [
        flat if r == state.rank else state.at(r, locations[r], dtype, 0, count)
        for r in range(state.size)
    ]
    start, stop = share(count, state.rank, state.size)
    step = PIECE_BYTES // dtype.itemsize
    # pieces stay in a core's cache between the additions; all are cut in one call of `split`, as a
    # slice of its own costs as much as adding a thousand numbers
    for pieces in zip(*[t[start:stop].split(step) for t in tensors], strict=True):
        if call.root < 0:
            reduce_into(pieces[0], pieces, call.op)
            for piece in pieces[1:]:
                piece.copy_(pieces[0])
        else:
            reduce_into(pieces[call.root], pieces, call.op)
    state.sync()


def _reduce_through_slots(
    state: GroupState, call: Call, flat: Tensor, *, gets_result: bool
) -> None:
    """In each step: copy a piece in, reduce this rank's share of an earlier one, copy one out."""
    size, dtype = state.size, flat.dtype
    slots = [state.slots(r, dtype) for r in range(size)]
    ring = state.ring
    step = ring.slot_bytes // dtype.itemsize
    pieces = flat.split(step)
    # reduce leaves the tensors of other ranks than the root as they are
    spare = None if gets_result else torch.empty(len(pieces[0]), dtype=dtype, device="cpu")
    for fill, now, fetch in state.pipeline(len(pieces), stages=3):
        if fill >= 0:
            slots[state.rank][fill % ring.slots][: len(pieces[fill])].copy_(pieces[fill])
        if now >= 0:
            start, stop = share(len(pieces[now]), state.rank, size)
            if start < stop:
                result = (pieces[now] if spare is None else spare)[start:stop]
                sources = [slots[r][now % ring.slots][start:stop] for r in range(size)]
                reduce_into(result, sources, call.op)
                sources[state.rank].copy_(result)
        if fetch >= 0 and gets_result:
            for r in range(size):
                start, stop = share(len(pieces[fetch]), r, size)
                if r != state.rank and start < stop:
                    pieces[fetch][start:stop].copy_(slots[r][fetch % ring.slots][start:stop])
