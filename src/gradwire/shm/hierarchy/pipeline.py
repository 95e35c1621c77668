"""Schedule of a collective's phases, and division of its elements into pieces; integers only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

LAG = 1
"""Number of pieces by which a phase is behind the previous one, while the link transfers them."""
END_BYTES = 512 << 10
"""Block size of the first and last piece, when the link waits for the team or vice versa."""
LARGE_BYTES = 2 << 20
"""Maximum block size of other pieces: without a limit of the link, 26 MB took 68 ms, with half of
this 79."""
SMALL_BYTES = 512 << 10
"""Minimum block size: shorter blocks cost more in waits and messages than they gain, on 1 Gbit/s as
well. Without a limit of the link, 1 MB took 5 ms in one block, in four 13."""
FRACTION = 4
"""Maximum part of the data in a block, as 1 / this, unless it is small: phases must overlap."""


@dataclass(frozen=True)
class Cut:
    """Division into pieces of equal blocks: short at both ends of the pipeline, longer between.

    Args:
        count: Number of elements.
        parts: Number of blocks in a piece.
        blocks: Elements of a block in each piece; the last piece may need padding.

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
        """Divide `count` elements into pieces of `parts` blocks."""
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
        """Number of pieces."""
        return len(self.blocks)

    def spans(self) -> list[tuple[int, int]]:
        """Return start and end of each piece."""
        stops = [self.parts * stop for stop in accumulate(self.blocks)]
        return [(start, min(stop, self.count)) for start, stop in zip([0, *stops], stops)]  # noqa: B905


def pipelined(pieces: int, phases: Sequence[Callable[[int], None]]) -> None:
    """Call each phase with each piece, in a pipeline: later phases work on earlier pieces.

    All ranks of a team call the phases in the same order, as those within the team are collectives.

    Args:
        pieces: Number of pieces.
        phases: Functions of the number of a piece, in order.
    """
    for step in range(pieces + LAG * (len(phases) - 1)):
        for i, phase in enumerate(phases):
            piece = step - LAG * i
            if 0 <= piece < pieces:
                phase(piece)
