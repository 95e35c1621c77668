"""Exchanges over shared memory: all-to-all, all_gather, broadcast, gather and scatter.

Every rank has a block for each other rank, or one for all.
Each rank fetches its blocks. Up to `inline_bytes`, a rank's blocks are written beside its header,
and up to `upfront_limit` they are copied to a region beforehand: both take one wait. Blocks in
regions are copied straight from there. All others pass in pieces through the staging slots, so that
copies in and out overlap between ranks.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor

from gradwire.shm.header import INLINE, NUMBERS, PRIVATE, Call, Location
from gradwire.shm.meeting import UPFRONT_BYTES, GroupState
from gradwire.shm.regions import USERS
from gradwire.shm.tensors import checksum, common_base, copy, overwrites

PIECE_BYTES = 256 << 10  # shorter pieces cost more in waits than they save in cache misses
_LIST_PIECES = 4
"""Minimum number of pieces of a list, so that copies in and out overlap."""
_LIST_PIECE_BYTES = 128 << 10
"""Minimum size of pieces: for shorter ones, the waits would cost more than the overlap gains."""
_LINE = 64  # elements; shares end between cache lines, so that ranks do not write to the same one


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


class Movement(GroupState):
    """State of a group, with the collectives that move values."""

    def barrier(self, kind: str = "barrier") -> None:
        """Wait until every rank has called."""
        self.announce(Call(kind), Location(INLINE))

    def broadcast(self, call: Call, flat: Tensor) -> None:
        """Copy the root's values to all ranks' tensors."""
        at_root, count = self.rank == call.root, flat.numel()
        outgoing = [flat] if at_root else []
        incoming = [flat if r == call.root and not at_root else None for r in range(self.size)]
        if flat.nbytes <= self.inline_bytes:
            self.exchange(call, outgoing, incoming, shared=True)
            return
        limit = self.upfront_limit(alone=False)  # in many programs, the root changes
        self.announce(call, self.location_for([flat], flat, sends=at_root, limit=limit))
        locations = self.locations()
        if locations[call.root].region == PRIVATE:
            sends = self._equal_blocks(call)
            self.exchange_through_slots(call, sends, [call.root], outgoing, incoming, shared=True)
            return
        # root and receivers copy at the same time: with tensors in regions, the root writes the
        # first share to each receiver, which fetches the rest
        in_place = locations[call.root].region >= USERS
        first = share(count, 0, self.size)[1] if in_place else 0
        if not at_root:
            start = first if locations[self.rank].region >= 0 else 0
            source = self.at(call.root, locations[call.root], flat.dtype, start, count - start)
            copy(flat[start:], source)
        elif in_place:
            for rank, location in enumerate(locations):
                if rank != self.rank and location.region >= 0:
                    copy(self.at(rank, location, flat.dtype, 0, first), flat[:first])
        if in_place:
            self.sync(None if at_root else [call.root])

    def exchange_blocks(
        self,
        kind: str,
        outgoing: Sequence[Tensor],
        incoming: Sequence[Tensor],
        *,
        base: Tensor | None = None,
        shared: bool = False,
    ) -> None:
        """Run `exchange` for blocks whose sizes may differ, which the ranks compare."""
        sends = tuple(block.numel() for block in outgoing) * (self.size if shared else 1)
        receives = tuple(block.numel() for block in incoming)
        call = Call(kind, incoming[0].dtype, sends=sends, receives=receives)
        self.exchange(call, outgoing, incoming, base=base, shared=shared)

    def exchange(
        self,
        call: Call,
        outgoing: Sequence[Tensor],
        incoming: Sequence[Tensor | None],
        *,
        base: Tensor | None = None,
        shared: bool = False,
    ) -> None:
        """Fetch the block that every other rank has for this one."""
        # `outgoing` has a block for each rank, or one for all if `shared`, or none
        own = outgoing[0 if shared else self.rank] if outgoing else None
        if sum(block.nbytes for block in outgoing) > self.inline_bytes:
            # incoming tensors overlap outgoing blocks: these are copied first
            if overwrites(outgoing, incoming, self.rank, own):
                outgoing, base = [block.clone() for block in outgoing], None
                own = outgoing[0 if shared else self.rank]
            elif base is None:
                base = common_base(outgoing)
            start = 0 if shared else block_start(call, self.rank)
            unread = (0, 0) if shared else (start, start + outgoing[self.rank].numel())
            limit = self.upfront_limit(alone=call.kind == "scatter")
            self.announce(call, self.location_for(outgoing, base, unread, limit=limit))
        else:
            self.announce(call, Location(INLINE), outgoing)
        locations = self.locations()
        sends = self.sends() if call.sends else self._equal_blocks(call)
        # this rank's own block needs no other rank
        if own is not None and (target := incoming[self.rank]) is not None:
            copy(target, own)
        staged = []
        for rank, (its_location, sent) in enumerate(zip(locations, sends, strict=True)):
            target = incoming[rank]
            if its_location.region == PRIVATE:
                staged.append(rank)
            elif rank != self.rank and target is not None and target.numel():
                start = 0 if shared else sum(sent[: self.rank])
                count = target.numel()
                if its_location.region == INLINE:
                    target.copy_(self.inline(rank, call.dtype, start, count))
                else:
                    copy(target, self.at(rank, its_location, call.dtype, start, count))
        if staged:
            self.exchange_through_slots(call, sends, staged, outgoing, incoming, shared=shared)
        in_place = [rank for rank, at in enumerate(locations) if at.region >= USERS]
        if in_place:
            self.sync(self._partners(sends, in_place))

    def _equal_blocks(self, call: Call) -> list[list[int]]:
        """Return the number of elements from each rank for each, if all blocks have one size."""
        return [[call.numel] * self.size] * self.size

    def _partners(self, sends: Sequence[Sequence[int]], sources: Sequence[int]) -> list[int]:
        """Return the ranks that read from this one, if it is a source, and the sources it reads."""
        rank = self.rank

        def reads(reader: int, source: int) -> bool:
            return source in sources and sends[source][reader] > 0

        return [r for r in range(self.size) if r != rank and (reads(r, rank) or reads(rank, r))]

    def exchange_through_slots(
        self,
        call: Call,
        sends: Sequence[Sequence[int]],
        staged: Sequence[int],
        outgoing: Sequence[Tensor],
        incoming: Sequence[Tensor | None],
        *,
        shared: bool,
    ) -> None:
        """Fetch this rank's blocks among those that pass through slots."""
        columns = 1 if shared else max(1, self.size - 1)  # without the rank's block for itself
        longest = max(max(sends[rank]) for rank in staged)
        ring, total = self.ring, longest * columns * call.dtype.itemsize
        # at least two pieces if the ring has two slots, so that copies in and out overlap
        step = (
            min(ring.slot_bytes, max(PIECE_BYTES, total // min(2, ring.slots)))
            // call.dtype.itemsize
            // columns
        )
        slots = {rank: self.slots(rank, call.dtype) for rank in staged}
        others = outgoing if shared else [*outgoing[: self.rank], *outgoing[self.rank + 1 :]]
        pieces, partners = math.ceil(longest / step), self._partners(sends, staged)
        for fill, fetch in self.pipeline(pieces, stages=2, partners=partners):
            if self.rank in staged and fill >= 0:
                lo = fill * step
                slot = slots[self.rank][fill % ring.slots]
                fill_slot(slot, [block[lo : lo + step] for block in others], step)
            lo = fetch * step
            for rank in staged:
                target = incoming[rank]
                if rank != self.rank and target is not None and 0 <= lo < target.numel():
                    piece, slot = target[lo : lo + step], slots[rank][fetch % ring.slots]
                    column = 0 if shared else self.rank - (rank < self.rank)
                    copy(piece, slot[column * step :][: piece.numel()])

    def location_for(
        self,
        blocks: Sequence[Tensor],
        base: Tensor | None,
        unread: tuple[int, int] = (0, 0),
        *,
        sends: bool = True,
        reduces: bool = False,
        limit: int = UPFRONT_BYTES[0],
    ) -> Location:
        """Return where this rank's data is: in a region, or in the ring that it passes through."""
        location = Location(PRIVATE) if base is None else self.locate(base)
        if location.region != PRIVATE:
            return location
        nbytes = sum(block.nbytes for block in blocks)
        # only up to `limit` bytes in private memory are copied to a region
        if nbytes > limit or not sends:
            return self.staged_location(nbytes, sends=sends, reduces=reduces)
        location, target = self.upfront(blocks[0].dtype, nbytes)
        # no other rank reads the elements `unread`: they are not copied
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

    def sync_in_place(self, locations: Sequence[Location]) -> None:
        """Wait until all ranks have finished with the others' tensors, if any are used in place."""
        if any(location.region >= USERS for location in locations):
            self.sync()

    def gather(self, root: int, source: Tensor, into: Sequence[Tensor]) -> None:
        """Copy each rank's values to the root's tensors `into`; others pass none."""
        at_root, dtype = self.rank == root, source.dtype
        sends = tuple(source.numel() if r == root else 0 for r in range(self.size))
        receives = tuple(target.numel() for target in into) if at_root else (0,) * self.size
        call = Call("gather", dtype, root=root, sends=sends, receives=receives)
        if not at_root:
            self.exchange(call, [source], [None] * self.size, shared=True)
            return
        # no other rank reads the root's own block
        own = source.clone() if overwrites([source], into, root, source) else source
        self.exchange(call, [], into, shared=True)
        copy(into[root], own)

    def scatter(self, root: int, blocks: Sequence[Tensor], out: Tensor) -> None:
        """Copy the root's block for each rank to that rank; others pass no blocks."""
        at_root, count = self.rank == root, out.numel()
        sends = tuple(block.numel() for block in blocks) if at_root else (0,) * self.size
        receives = tuple(count if r == root else 0 for r in range(self.size))
        call = Call("scatter", out.dtype, root=root, sends=sends, receives=receives)
        incoming = [out if r == root else None for r in range(self.size)]
        self.exchange(call, blocks, incoming)

    def broadcast_list(self, flats: Sequence[Tensor], root: int) -> None:
        """Copy a list of the root's tensors to all ranks, as a stream of pieces."""
        # A piece fills a slot, whether it is part of a large tensor or a hundred small ones. For
        # ResNet-50's 320 tensors this takes a quarter of the time of one broadcast per large tensor
        # and one for the rest, packed.
        dtypes = [flat.dtype for flat in flats]
        # as bytes, a piece may hold tensors of several dtypes
        dtype = dtypes[0] if len({*dtypes}) == 1 else torch.uint8
        parts = [flat if flat.dtype is dtype else flat.view(dtype) for flat in flats]
        sizes = [part.numel() for part in parts]  # `len` takes three times as long
        ends = list(accumulate(sizes))
        total = ends[-1] if ends else 0
        location = self.staged_location(total * dtype.itemsize, sends=self.rank == root)
        number = checksum([*map(NUMBERS.__getitem__, dtypes), *sizes])
        self.announce(
            Call("broadcast_coalesced", numel=total, root=root, checksum=number), location
        )
        if self.size == 1:
            return
        ring, slots = self.ring, self.slots(root, dtype)
        least = _LIST_PIECE_BYTES // dtype.itemsize
        step = min(ring.slot_bytes // dtype.itemsize, max(least, total // _LIST_PIECES))
        partners = None if self.rank == root else [root]
        for fill, fetch in self.pipeline(math.ceil(total / step), stages=2, partners=partners):
            now = fill if self.rank == root else fetch
            if now < 0:
                continue
            lo, hi = now * step, min((now + 1) * step, total)
            first, last = bisect_right(ends, lo), bisect_left(ends, hi)
            piece = [*parts[first : last + 1]]
            piece[-1] = piece[-1][: len(piece[-1]) - (ends[last] - hi)]
            piece[0] = piece[0][lo - (ends[first] - len(parts[first])) :]
            shared = slots[now % ring.slots][: hi - lo]
            if self.rank == root:
                torch.cat(piece, out=shared)
            else:
                torch.split_with_sizes_copy(shared, [part.numel() for part in piece], out=piece)
