"""The order of a collective's phases, and how its elements are cut into pieces: integers alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

LAG = 1
"""How many pieces a phase is behind the one before it: what the link works on meanwhile."""
END_BYTES = 512 << 10
"""Blocks of the first and the last piece, when the link waits for the team or the team for it."""
LARGE_BYTES = 2 << 20
"""Blocks between are at most this: where the link has no limit, 26 MB took 68 ms, in blocks of half
of it 79."""
SMALL_BYTES = 512 << 10
"""Shorter blocks than this cost more in waits and messages than they gain, on 1 Gbit/s too: where
the link has no limit, 1 MB took 5 ms in one block, in blocks of a quarter of it 13."""
FRACTION = 4
"""No block is more than such a part of what is cut, unless it is small: phases are to overlap."""


@dataclass(frozen=True)
class Cut:
    """Pieces of equal blocks for `parts`: short at both ends of the pipeline, longer between.

    Args:
        count: Elements in all.
        parts: How many blocks a piece has.
        blocks: Elements of a block in each piece; the last piece may have to be filled up.

    Example:
        >>> from gradwire.shm.hierarchy.pipeline import Cut
        >>> cut = Cut.of(10_000_001, parts=4, itemsize=4)
        >>> [block * 4 // 1024 for block in cut.blocks]  # KiB
        [512, 1024, 1673, 1673, 1673, 1673, 1024, 512]
    """

    count: int
    parts: int
    blocks: tuple[int, ...]

    @classmethod
    def of(cls, count: int, parts: int, itemsize: int) -> Cut:
        """Cut so many elements for so many parts."""
        left = -(-count // parts)
        small = max(1, SMALL_BYTES // itemsize)
        largest = min(LARGE_BYTES // itemsize, max(small, left // FRACTION))
        end: list[int] = []
        size = max(1, min(END_BYTES // itemsize, largest))
        while size < largest and 2 * (sum(end) + size) <= left:
            end.append(size)
            size *= 2
        middle = left - 2 * sum(end)
        number = -(-middle // max(1, largest))
        blocks = [middle // number + (i < middle % number) for i in range(number)]
        return cls(count, parts, (*end, *blocks, *end[::-1]))

    @property
    def pieces(self) -> int:
        """How many."""
        return len(self.blocks)

    def spans(self) -> list[tuple[int, int]]:
        """For each piece its first element, and the one after its last."""
        stops = [self.parts * stop for stop in accumulate(self.blocks)]
        return [(start, min(stop, self.count)) for start, stop in zip([0, *stops], stops)]  # noqa: B905


def pipelined(pieces: int, phases: Sequence[Callable[[int], None]]) -> None:
    """Call each phase with each piece: one phase on a piece while others are on those before.

    All ranks of a team call the phases in the same order, as those within the team are collectives.

    Args:
        pieces: How many.
        phases: In their order; each is called with the number of a piece.
    """
    for step in range(pieces + LAG * (len(phases) - 1)):
        for i, phase in enumerate(phases):
            piece = step - LAG * i
            if 0 <= piece < pieces:
                phase(piece)
