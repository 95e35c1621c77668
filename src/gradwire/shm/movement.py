"""Exchanges over shared memory: every rank has a block for each other rank, or one for all.

Each rank fetches its blocks. Up to `inline_bytes`, a rank's blocks are written beside its header,
and up to `upfront_limit` they are copied to a region beforehand: both take one wait. Blocks in
regions are copied straight from there. All others pass in pieces through the staging slots, so that
copies in and out overlap between ranks.
"""

from __future__ import annotations

import math
import zlib
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor

from gradwire.shm.header import INLINE, NUMBERS, PRIVATE, UNEVEN, Call, Location
from gradwire.shm.meeting import UPFRONT_BYTES, GroupState
from gradwire.shm.regions import USERS
from gradwire.shm.tensors import common_base, copy, overwrites

PIECE_BYTES = 256 << 10  # shorter pieces cost more in waits than they save in cache misses
_LINE = 64  # elements; shares end between cache lines, so that ranks do not write to the same one


def barrier(state: GroupState, kind: str = "barrier") -> None:
    """Wait until every rank has called."""
    state.announce(Call(kind), Location(INLINE))


def broadcast(state: GroupState, call: Call, flat: Tensor) -> None:
    """Copy the root's values to all ranks' tensors."""
    at_root, count = state.rank == call.root, flat.numel()
    outgoing = [flat] if at_root else []
    incoming = [flat if r == call.root and not at_root else None for r in range(state.size)]
    if flat.nbytes <= state.inline_bytes:
        exchange(state, call, outgoing, incoming, shared=True)
        return
    limit = state.upfront_limit(alone=False)  # in many programs, the root changes
    state.announce(call, location_for(state, [flat], flat, sends=at_root, limit=limit))
    locations = state.locations()
    if locations[call.root].region == PRIVATE:
        sends = _equal_blocks(state, call)
        exchange_through_slots(state, call, sends, [call.root], outgoing, incoming, shared=True)
        return
    # root and receivers copy at the same time: with tensors in regions, the root writes the first
    # share to each receiver, which fetches the rest
    in_place = locations[call.root].region >= USERS
    first = share(count, 0, state.size)[1] if in_place else 0
    if not at_root:
        start = first if locations[state.rank].region >= 0 else 0
        source = state.at(call.root, locations[call.root], flat.dtype, start, count - start)
        copy(flat[start:], source)
    elif in_place:
        for rank, location in enumerate(locations):
            if rank != state.rank and location.region >= 0:
                copy(state.at(rank, location, flat.dtype, 0, first), flat[:first])
    if in_place:
        state.sync(None if at_root else [call.root])


def exchange_blocks(
    state: GroupState,
    kind: str,
    outgoing: Sequence[Tensor],
    incoming: Sequence[Tensor],
    *,
    base: Tensor | None = None,
    shared: bool = False,
) -> None:
    """Run `exchange` for blocks whose sizes may differ, which the ranks compare."""
    sends = tuple(block.numel() for block in outgoing) * (state.size if shared else 1)
    receives = tuple(block.numel() for block in incoming)
    call = Call(kind, incoming[0].dtype, sends=sends, receives=receives)
    exchange(state, call, outgoing, incoming, base=base, shared=shared)


def exchange(
    state: GroupState,
    call: Call,
    outgoing: Sequence[Tensor],
    incoming: Sequence[Tensor | None],
    *,
    base: Tensor | None = None,
    shared: bool = False,
) -> None:
    """Fetch the block that every other rank has for this one.

    Args:
        state: State of the group on this rank.
        call: Call with tables of block sizes, or with the size of all blocks.
        outgoing: Block of this rank for each rank; one for all if `shared`; or empty.
        incoming: Tensor for each rank's block, 1-d and contiguous; None if there is none. If they
            overlap outgoing blocks, these are copied first.
        base: Contiguous tensor that holds the outgoing blocks in order; None to find it, if they
            are adjacent.
        shared: True if a rank's one block goes to all ranks.
    """
    own = outgoing[0 if shared else state.rank] if outgoing else None
    if sum(block.nbytes for block in outgoing) > state.inline_bytes:
        if overwrites(outgoing, incoming, state.rank, own):
            outgoing, base = [block.clone() for block in outgoing], None
            own = outgoing[0 if shared else state.rank]
        elif base is None:
            base = common_base(outgoing)
        start = 0 if shared else block_start(call, state.rank)
        unread = (0, 0) if shared else (start, start + outgoing[state.rank].numel())
        limit = state.upfront_limit(alone=False)
        state.announce(call, location_for(state, outgoing, base, unread, limit=limit))
    else:
        state.announce(call, Location(INLINE), outgoing)
    locations = state.locations()
    sends = state.sends() if call.sends else _equal_blocks(state, call)
    # this rank's own block needs no other rank
    if own is not None and (target := incoming[state.rank]) is not None:
        copy(target, own)
    staged = []
    for rank, (its_location, sent) in enumerate(zip(locations, sends, strict=True)):
        target = incoming[rank]
        if its_location.region == PRIVATE:
            staged.append(rank)
        elif rank != state.rank and target is not None and target.numel():
            start = 0 if shared else sum(sent[: state.rank])
            fetch_block(state, rank, its_location, start, target)
    if staged:
        exchange_through_slots(state, call, sends, staged, outgoing, incoming, shared=shared)
    in_place = [rank for rank, at in enumerate(locations) if at.region >= USERS]
    if in_place:
        state.sync(_partners(state, sends, in_place))


def _equal_blocks(state: GroupState, call: Call) -> list[list[int]]:
    """Return the number of elements from each rank for each, if all blocks have one size."""
    return [[call.numel] * state.size] * state.size


def _partners(
    state: GroupState, sends: Sequence[Sequence[int]], sources: Sequence[int]
) -> list[int]:
    """Return the ranks that read from this rank, if it is a source, and the sources it reads."""
    rank = state.rank

    def reads(reader: int, source: int) -> bool:
        return source in sources and sends[source][reader] > 0

    return [r for r in range(state.size) if r != rank and (reads(r, rank) or reads(rank, r))]


def exchange_through_slots(
    state: GroupState,
    call: Call,
    sends: Sequence[Sequence[int]],
    staged: Sequence[int],
    outgoing: Sequence[Tensor],
    incoming: Sequence[Tensor | None],
    *,
    shared: bool,
) -> None:
    """Fetch this rank's blocks among those that pass through slots.

    Args:
        state: State of the group on this rank.
        call: Call of the collective.
        sends: Number of elements from each rank for each; rows of ranks that are not staged are
            not read.
        staged: Ranks whose blocks pass through slots.
        outgoing: Blocks to send; see `exchange`.
        incoming: Tensors to fill; see `exchange`.
        shared: True for one block for all ranks; see `exchange`.
    """
    columns = 1 if shared else max(1, state.size - 1)  # without the rank's block for itself
    longest = max(max(sends[rank]) for rank in staged)
    ring, total = state.ring, longest * columns * call.dtype.itemsize
    # at least two pieces if the ring has two slots, so that copies in and out overlap
    step = (
        min(ring.slot_bytes, max(PIECE_BYTES, total // min(2, ring.slots)))
        // call.dtype.itemsize
        // columns
    )
    slots = {rank: state.slots(rank, call.dtype) for rank in staged}
    others = outgoing if shared else [*outgoing[: state.rank], *outgoing[state.rank + 1 :]]
    pieces, partners = math.ceil(longest / step), _partners(state, sends, staged)
    for fill, fetch in state.pipeline(pieces, stages=2, partners=partners):
        if state.rank in staged and fill >= 0:
            lo = fill * step
            slot = slots[state.rank][fill % ring.slots]
            fill_slot(slot, [block[lo : lo + step] for block in others], step)
        lo = fetch * step
        for rank in staged:
            target = incoming[rank]
            if rank != state.rank and target is not None and 0 <= lo < target.numel():
                piece, slot = target[lo : lo + step], slots[rank][fetch % ring.slots]
                column = 0 if shared else state.rank - (rank < state.rank)
                copy(piece, slot[column * step :][: piece.numel()])


# --- locations, shares and slots, of exchanges and reductions ---


def location_for(
    state: GroupState,
    blocks: Sequence[Tensor],
    base: Tensor | None,
    unread: tuple[int, int] = (0, 0),
    *,
    sends: bool = True,
    reduces: bool = False,
    limit: int = UPFRONT_BYTES[0],
) -> Location:
    """Return the location of this rank's data: in a region, or the ring that it passes through.

    Args:
        state: State of the group on this rank.
        blocks: Data, one block after the other.
        base: Tensor that holds all of the data; None if there is none.
        unread: Start and end of the elements that no other rank reads.
        sends: True if other ranks read the data.
        reduces: True if all ranks reduce the data at the same time.
        limit: Maximum number of bytes in private memory that are copied to a region.
    """
    location = Location(PRIVATE) if base is None else state.locate(base)
    if location.region != PRIVATE:
        return location
    nbytes = sum(block.nbytes for block in blocks)
    if nbytes > limit or not sends:
        return state.staged_location(nbytes, sends=sends, reduces=reduces)
    location, target = state.upfront(blocks[0].dtype, nbytes)
    if base is not None:
        total = nbytes // base.element_size()
        copy_but(unread, base.as_strided((total,), (1,)), target)
        return location
    start = 0
    for block in blocks:
        stop = start + block.numel()
        if start < stop and (start, stop) != unread:
            copy(target[start:stop], block)
        start = stop
    return location


def sync_in_place(state: GroupState, locations: Sequence[Location]) -> None:
    """Wait until all ranks have finished with the others' tensors, if any are used in place."""
    if any(location.region >= USERS for location in locations):
        state.sync()


def fetch_block(state: GroupState, rank: int, at: Location, start: int, target: Tensor) -> None:
    """Copy elements of a rank's data, beside its header or in a region, from `start` on."""
    dtype, count = target.dtype, target.numel()
    if at.region == INLINE:
        target.copy_(state.inline(rank, dtype, start, count))
    else:
        copy(target, state.at(rank, at, dtype, start, count))


def copy_but(unread: tuple[int, int], source: Tensor, target: Tensor) -> None:
    """Copy the elements before and after the range `unread`."""
    for start, stop in ((0, unread[0]), (unread[1], source.numel())):
        if start < stop:
            copy(target[start:stop], source[start:stop])


def block_start(call: Call, rank: int) -> int:
    """Return the start of the block for `rank` among the blocks of the calling rank."""
    return sum(call.sends[:rank]) if call.sends else rank * call.numel


@lru_cache(1024)
def share(count: int, rank: int, size: int) -> tuple[int, int]:
    """Return start and end of the elements that a rank reduces; all shares cover 0 to count."""
    each = math.ceil(count / size / _LINE) * _LINE
    return min(rank * each, count), min((rank + 1) * each, count)


def fill_slot(slot: Tensor, pieces: Sequence[Tensor], step: int) -> None:
    """Copy piece i to a slot, starting at element i * step."""
    for i, piece in enumerate(pieces):
        if piece.numel():
            copy(slot[i * step :][: piece.numel()], piece)


_PIECES = 4
"""Minimum number of pieces of a stream, so that copies in and out overlap."""
_PIECE_BYTES = 128 << 10
"""Minimum size of pieces: for shorter ones, the waits would cost more than the overlap gains."""


def gather(state: GroupState, root: int, source: Tensor, into: Sequence[Tensor]) -> None:
    """Copy each rank's values to the root.

    Args:
        state: State of the group on this rank.
        root: Rank of the root in the group.
        source: Values of this rank, 1-d and contiguous.
        into: Tensors for each rank's values on the root, 1-d and contiguous; empty on other ranks.
    """
    if state.rank == root:
        _gather_here(state, source, into)
        return
    call = Call("gather", source.dtype, source.numel(), root=root)
    if source.nbytes <= state.inline_bytes:
        state.announce(call, Location(INLINE), [source])
        return
    limit = state.upfront_limit(alone=False)
    location = location_for(state, [source], source, limit=limit)
    state.announce(call, location)
    if location.region == PRIVATE:
        staged = _staged(state.locations())
        sizes = {rank: source.numel() if state.alike else _numel(state, rank) for rank in staged}
        sends = _columns(state, root, sizes)
        nothing = [None] * state.size
        exchange_through_slots(state, call, sends, staged, [source], nothing, shared=True)
    elif location.region >= USERS:
        state.wait([root])


def _gather_here(state: GroupState, source: Tensor, into: Sequence[Tensor]) -> None:
    rank, own, dtype = state.rank, source.numel(), source.dtype
    sizes = tuple(target.numel() for target in into)
    if sizes.count(own) == state.size:
        call = Call("gather", dtype, own, root=rank)
    else:
        sends = tuple(own if r == rank else 0 for r in range(state.size))
        call = Call("gather", dtype, UNEVEN, -1, rank, sends, sizes)
    state.announce(call, Location(INLINE))
    copy(into[rank], source)
    if state.size == 1:
        return
    locations = state.locations()
    if not call.sends and all(location.region == INLINE for location in locations):
        blocks = state.all_inline(dtype, own)
        torch._foreach_copy_(_but(into, rank), _but(blocks, rank))
        return
    for r, (location, target) in enumerate(zip(locations, into, strict=True)):
        if r != rank and location.region != PRIVATE and sizes[r]:
            fetch_block(state, r, location, 0, target)
    if staged := _staged(locations):
        columns = _columns(state, rank, dict(enumerate(sizes)))
        exchange_through_slots(state, call, columns, staged, [], into, shared=True)
    if in_place := [r for r, location in enumerate(locations) if location.region >= USERS]:
        state.post(in_place)


def _staged(locations: Sequence[Location]) -> list[int]:
    return [rank for rank, location in enumerate(locations) if location.region == PRIVATE]


def _numel(state: GroupState, rank: int) -> int:
    return state.call_of(rank).numel


def _columns(state: GroupState, root: int, sizes: dict[int, int]) -> list[list[int]]:
    """Return the number of elements from each rank for each, in a gather."""
    rows = [[0] * state.size for _ in range(state.size)]
    for rank, size in sizes.items():
        rows[rank][root] = size
    return rows


def _but(tensors: Sequence[Tensor], rank: int) -> list[Tensor]:
    return [*tensors[:rank], *tensors[rank + 1 :]]


def scatter(state: GroupState, root: int, blocks: Sequence[Tensor], out: Tensor) -> None:
    """Copy the root's block for each rank to that rank.

    Args:
        state: State of the group on this rank.
        root: Rank of the root in the group.
        blocks: Block for each rank on the root, 1-d and contiguous; empty on other ranks.
        out: Tensor for this rank's block, 1-d and contiguous. On the root it may overlap the
            blocks, which are then copied.
    """
    if state.rank == root:
        _scatter_from_here(state, blocks, out)
        return
    call, count = Call("scatter", out.dtype, out.numel(), root=root), out.numel()
    state.announce(call, Location(INLINE))
    location = state.locations()[root]
    sends = (count,) * state.size if state.alike else state.call_of(root).sends
    if location.region == PRIVATE:
        incoming = [out if r == root else None for r in range(state.size)]
        rows = [list(sends)] * state.size
        exchange_through_slots(state, call, rows, [root], [], incoming, shared=False)
    elif count:
        fetch_block(state, root, location, sum(sends[: state.rank]), out)
    if location.region >= USERS and count:
        state.post([root])


def _scatter_from_here(state: GroupState, blocks: Sequence[Tensor], out: Tensor) -> None:
    rank, count, own = state.rank, out.numel(), blocks[state.rank]
    sizes = tuple(block.numel() for block in blocks)
    if sizes.count(count) == state.size:
        call = Call("scatter", out.dtype, count, root=rank)
    else:
        receives = tuple(count if r == rank else 0 for r in range(state.size))
        call = Call("scatter", out.dtype, UNEVEN, -1, rank, sizes, receives)
    if sum(sizes) * out.element_size() <= state.inline_bytes:
        state.announce(call, Location(INLINE), blocks)
        copy(out, own)
        return
    base = common_base(blocks)
    if overwrites(blocks, [out if r == rank else None for r in range(state.size)], rank, own):
        blocks, base = [block.clone() for block in blocks], None
        own = blocks[rank]
    start = sum(sizes[:rank])
    location = location_for(
        state, blocks, base, (start, start + sizes[rank]), limit=state.upfront_limit(alone=True)
    )
    state.announce(call, location)
    copy(out, own)
    if location.region == PRIVATE:
        rows, nothing = [list(sizes)] * state.size, [None] * state.size
        exchange_through_slots(state, call, rows, [rank], blocks, nothing, shared=False)
    elif location.region >= USERS:
        state.wait([r for r in range(state.size) if r != rank and sizes[r]])


def broadcast_list(state: GroupState, flats: Sequence[Tensor], root: int) -> None:
    """Copy a list of the root's tensors to all ranks, as a stream of pieces.

    A piece fills a slot, whether it is part of a large tensor or a hundred small ones. For
    ResNet-50's 320 tensors this takes a quarter of the time of one broadcast per large tensor and
    one for the rest, packed.

    Args:
        state: State of the group on this rank.
        flats: 1-d contiguous tensors of any dtypes, with equal sizes and dtypes on all ranks.
        root: Rank of the root in the group.
    """
    runs = _runs(flats)
    total = sum(sum(run.sizes) * run.dtype.itemsize for run in runs)
    location = state.staged_location(total, sends=state.rank == root)
    call = Call("broadcast_coalesced", numel=total, root=root, checksum=_checksum(flats, runs))
    state.announce(call, location)
    if state.size == 1:
        return
    ring = state.ring
    limit = min(ring.slot_bytes, max(_PIECE_BYTES, total // _PIECES))
    pieces = [piece for run in runs for piece in _pieces(run, limit // run.dtype.itemsize)]
    slots: dict[torch.dtype, list[Tensor]] = {}
    partners = None if state.rank == root else [root]
    for fill, fetch in state.pipeline(len(pieces), stages=2, partners=partners):
        now = fill if state.rank == root else fetch
        if now < 0:
            continue
        own, sizes = pieces[now]
        dtype = own[0].dtype
        if dtype not in slots:
            slots[dtype] = state.slots(root, dtype)
        shared = slots[dtype][now % ring.slots][: sum(sizes)]
        if state.rank == root:
            torch.cat(own, out=shared)
        else:
            torch.split_with_sizes_copy(shared, sizes, out=own)


@dataclass
class _Run:
    """Tensors of one dtype, in order, and their numbers of elements."""

    dtype: torch.dtype
    flats: list[Tensor]
    sizes: list[int]


def _runs(flats: Sequence[Tensor]) -> list[_Run]:
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for flat in flats:
        by_dtype.setdefault(flat.dtype, []).append(flat)
    return [
        _Run(dtype, alike, [flat.numel() for flat in alike]) for dtype, alike in by_dtype.items()
    ]


def _pieces(run: _Run, full: int) -> Iterator[tuple[list[Tensor], list[int]]]:
    """Yield pieces of `full` elements: lists of the run's tensors, the first and last cut."""
    ends = list(accumulate(run.sizes))
    for lo in range(0, ends[-1], full):
        hi = min(lo + full, ends[-1])
        first, last = bisect_right(ends, lo), bisect_left(ends, hi)
        tensors, sizes = run.flats[first : last + 1], run.sizes[first : last + 1]
        if (over := ends[last] - hi) > 0:
            sizes[-1] -= over
            tensors[-1] = tensors[-1][: sizes[-1]]
        if (before := lo - (ends[first] - run.sizes[first])) > 0:
            sizes[0] -= before
            tensors[0] = tensors[0][before:]
        yield tensors, sizes


def _checksum(flats: Sequence[Tensor], runs: Sequence[_Run]) -> int:
    """Return the checksum of all sizes and dtypes; sizes of one dtype are in tensor order."""
    numbers = [n for run in runs for n in (NUMBERS[run.dtype], len(run.sizes), *run.sizes)]
    if len(runs) > 1:
        numbers += [NUMBERS[flat.dtype] for flat in flats]
    return zlib.crc32(array("q", numbers))
