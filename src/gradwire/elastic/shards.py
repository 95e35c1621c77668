"""Which shards of a step's batch each member runs: integers alone."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from gradwire.errors import ArgumentError, ArgumentTypeError

__all__ = ["Shard", "check_shards", "deal"]


@dataclass(frozen=True)
class Shard:
    """Neighbouring shards of one step, run as one: a single one where sums are reproducible.

    Args:
        first: The number of the first one.
        stop: The number after the last.
    """

    first: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.first


def check_shards(shards: object) -> int:
    """The number of shards.

    Raises:
        ArgumentTypeError: Not an int.
        ArgumentError: Not a power of two.
    """
    if isinstance(shards, bool) or not isinstance(shards, int):
        raise ArgumentTypeError(f"shards is {shards!r}: pass an int, a power of two such as 8")
    if shards < 1 or shards & (shards - 1):
        raise ArgumentError(f"shards is {shards}: pass a power of two, such as 8")
    return shards


def deal(shards: int, members: int) -> list[range]:
    """Contiguous runs of shards for each member, of lengths that differ by one at most.

    Members beyond the number of shards get none, but take part in sums.

    Example:
        >>> deal(8, 3)
        [range(0, 3), range(3, 6), range(6, 8)]
        >>> deal(8, 4)
        [range(0, 2), range(2, 4), range(4, 6), range(6, 8)]
    """
    length, longer = divmod(shards, members)
    starts = [rank * length + min(rank, longer) for rank in range(members + 1)]
    return [range(start, stop) for start, stop in itertools.pairwise(starts)]
