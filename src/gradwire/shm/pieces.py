"""What exchanges and reductions over shared memory have in common: locations, shares and slots."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from gradwire.shm.group_state import GroupState
from gradwire.shm.header import PRIVATE, Call, Location

__all__ = ["PIECE_BYTES", "block_start", "fill_slot", "location_for", "share"]

PIECE_BYTES = 256 << 10  # shorter pieces cost more in waits than they gain in cache
_LINE = 64  # elements; shares end between cache lines, so that ranks do not write to the same one


def location_for(
    state: GroupState, base: Tensor | None, nbytes: int, *, sends: bool = True
) -> Location:
    """The location of this rank's data: a region, or the ring that it passes through.

    Args:
        state: This rank's state of the group.
        base: A tensor that holds all of the data; None if there is none.
        nbytes: Bytes of the data.
        sends: Whether this rank writes it to slots.
    """
    location = Location(PRIVATE) if base is None else state.locate(base)
    return state.staged_location(nbytes, sends=sends) if location.region == PRIVATE else location


def block_start(call: Call, rank: int) -> int:
    """Where the block for `rank` begins among the blocks of the rank that made this call."""
    return sum(call.sends[:rank]) if call.sends else rank * call.numel


def share(count: int, rank: int, size: int) -> tuple[int, int]:
    """The first and last element that a rank reduces; the shares of all ranks make 0 to count."""
    each = math.ceil(count / size / _LINE) * _LINE
    return min(rank * each, count), min((rank + 1) * each, count)


def fill_slot(slot: Tensor, pieces: Sequence[Tensor], step: int) -> None:
    """Copy piece i to elements i * step and on of a slot."""
    for i, piece in enumerate(pieces):
        if piece.numel():
            slot[i * step :][: piece.numel()].copy_(piece)
