"""On which core each rank was when it last had to wait, in shared memory."""

from __future__ import annotations

import ctypes

__all__ = ["PLACE_BYTES", "Placement"]

PLACE_BYTES = 64
"""Of one rank: a cache line, as each writes its own."""


class Placement:
    """Tells a rank whether it keeps a core from the one that it waits for.

    The kernel puts two ranks on one core where another process keeps the others busy, and for some
    ms after they were idle. What a rank knows of another is where that last was: a hint, on which
    nothing but speed depends, so that neither reads nor writes are ordered.

    Args:
        memory: `PLACE_BYTES` for each rank, zero when the group forms.
        rank: This rank.
    """

    def __init__(self, memory: memoryview, rank: int) -> None:
        self._places = memory.cast("i")
        self._stride = PLACE_BYTES // self._places.itemsize
        self._own = rank * self._stride
        self._core = ctypes.PyDLL(None).sched_getcpu

    def is_beside(self, peer: int) -> bool:
        """Note the core that this thread is on; whether a peer was on the same when it noted so."""
        here: int = self._core() + 1  # a rank that has not waited yet has 0
        self._places[self._own] = here
        return self._places[peer * self._stride] == here

    def close(self) -> None:
        """Let go of the memory: who still waits looks in a copy."""
        self._places = memoryview(bytearray(self._places)).cast("i")
