"""The rings of slots through which data passes between private memory and shared memory.

They are those of collectives, in each rank's staging region; a `MessageRing` is between two ranks.

Every torch op releases the GIL and acquires it again, for which it waits up to 5 ms while another
thread runs Python (sys.getswitchinterval). An operation that runs beside other threads therefore
takes few large slots.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["RINGS", "Ring", "ring_for"]


@dataclass(frozen=True)
class Ring:
    """A staging region's slots.

    Args:
        slots: How many; with one, a piece is copied in after the last was copied out.
        slot_bytes: The bytes of each.
    """

    slots: int
    slot_bytes: int

    def lag(self, stages: int) -> int:
        """How many steps a rank may be ahead of others in a pipeline of this many stages."""
        return max(0, self.slots // stages - 1)

    def schedule(self, pieces: int, stages: int) -> Iterator[list[int]]:
        """For each step of a pipeline, the number of the piece in each stage; -1 for none."""
        delay = self.lag(stages) + 1
        stride = 1 if self.slots >= stages else stages
        for step in range((pieces - 1) * stride + 1 + (stages - 1) * delay):
            found = (divmod(step - stage * delay, stride) for stage in range(stages))
            yield [n if rest == 0 and 0 <= n < pieces else -1 for n, rest in found]


RINGS = (
    # for what all ranks do at the same time, whose copies in and out need not overlap: a slot that
    # is used again and again stays in the caches. An all_reduce of 3 to 26 MB takes 0.73 to 0.91
    # of the time that it takes with the next: docs/design/shm.md
    Ring(1, 2 << 20),
    Ring(6, 1 << 20),
    # with fewer cores than ranks a step takes until each rank has had a core: what counts is how
    # few they are. An all_reduce of 10 MB between 16 ranks on two cores takes 52 ms with the last
    # ring, with the second 83
    Ring(1, 8 << 20),
    # DDP's buckets have 25 MiB: each stage is one op. An all_reduce of 26 MB in the group's thread,
    # under a main thread that runs Python, takes 89 ms with this ring and 190 ms with the second
    Ring(1, 32 << 20),
)
_REUSED, _SHORT, _LONG, _LONGEST = range(4)
_FEW = 4
"""Up to so many ranks reduce in a slot that is used again. Between eight on two cores, an
all_reduce of 4 MiB takes 1.1 of the time that it takes with the long slots, one of 25 MiB 1.5."""
_LARGE = 4 << 20
"""From this size on, an operation beside other threads asks for the last ring."""
_CROWD_BYTES = 512 << 20
"""What crowded ranks may take together; with more of them, the last ring is left to threads."""


def ring_for(nbytes: int, *, ranks: int, crowded: bool, beside_others: bool, reduces: bool) -> int:
    """The index in `RINGS` of the ring that a rank asks for.

    Args:
        nbytes: Bytes of the data.
        ranks: How many there are.
        crowded: Whether they have fewer cores together.
        beside_others: Whether other threads may run Python meanwhile.
        reduces: Whether all of them copy in, and reduce, at the same times.
    """
    if nbytes > _LARGE and beside_others:
        return _LONGEST
    if reduces and ranks <= _FEW:
        return _REUSED
    if not crowded:
        return _SHORT
    affordable = ranks * RINGS[_LONGEST].slot_bytes <= _CROWD_BYTES
    return _LONGEST if affordable and nbytes > RINGS[_LONG].slot_bytes else _LONG
