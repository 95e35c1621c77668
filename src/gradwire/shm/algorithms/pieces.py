"""Helpers for exchanges and reductions over shared memory: locations, shares and slots."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

from torch import Tensor

from gradwire.shm.algorithms.group_state import UPFRONT_BYTES, GroupState
from gradwire.shm.meeting.regions import USERS
from gradwire.shm.memory.copying import copy
from gradwire.shm.memory.header import PRIVATE, Call, Location

PIECE_BYTES = 256 << 10  # shorter pieces cost more in waits than they save in cache misses
_LINE = 64  # elements; shares end between cache lines, so that ranks do not write to the same one


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
