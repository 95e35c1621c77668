"""How long the steps are in which data passes through staging regions.

Every call of torch lets go of Python's lock and takes it again. While another thread runs Python,
each can take 5 ms for that (sys.getswitchinterval): a thread beside others takes few long steps.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["RINGS", "Ring", "ring_for"]


@dataclass(frozen=True)
class Ring:
    """The slots of a staging region, which data passes through piece by piece.

    Args:
        slots: How many; with one, a piece enters when the last has left.
        slot_bytes: The bytes of each.
    """

    slots: int
    slot_bytes: int

    def lag(self, stages: int) -> int:
        """How many turns ranks may be apart in a pipeline of so many stages."""
        return max(0, self.slots // stages - 1)

    def schedule(self, pieces: int, stages: int) -> Iterator[list[int]]:
        """For each turn of a pipeline, the number of the piece in each stage; -1 for none."""
        delay = self.lag(stages) + 1
        stride = 1 if self.slots >= stages else stages
        for turn in range((pieces - 1) * stride + 1 + (stages - 1) * delay):
            steps = (divmod(turn - stage * delay, stride) for stage in range(stages))
            yield [n if rest == 0 and 0 <= n < pieces else -1 for n, rest in steps]


RINGS = (
    Ring(6, 1 << 20),  # a piece stays in a core's cache from the copy in to the reduction
    Ring(1, 32 << 20),  # buckets are often 25 MiB: one step each for copies and reduction
)
_LONG_FROM = 4 << 20
"""From here on a thread beside others asks for the second ring."""


def ring_for(nbytes: int) -> int:
    """The number of the ring that this thread would have so much data pass through."""
    beside_others = threading.current_thread() is not threading.main_thread()
    return int(nbytes > _LONG_FROM and beside_others)
