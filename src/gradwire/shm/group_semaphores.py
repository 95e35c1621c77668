"""Waits between the ranks of a group."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from functools import partial

from gradwire.shm.sync import SEMAPHORE_BYTES, Semaphore, libraries

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


_GLANCES = 16  # about 3 µs: to look at the clock and to note so short a wait takes 1 µs
_YIELDS = 30
"""How often a rank that does not spin yields. A prepared all_reduce of 4 KiB between 3, 4, 8 and 16
ranks on two cores takes 31, 54, 165 and 560 µs instead of 50, 105, 250 and 700; with 10 it is as
much but for 3 ranks (46). Where the kernel gives the core back at once, it costs 25 µs a wait."""
_POLL_SECONDS = 0.05


class Semaphores:
    """The semaphores of a group, as one rank uses them: one for each ordered pair of ranks.

    Args:
        address: Where the `size` × `size` semaphores lie in this process.
        rank: This rank.
        size: How many ranks.
        spins: How often to try before yielding or sleeping.
        placement: The ranks' cores.

    Attributes:
        waited: For each peer whose post was not there within some µs, for how many ns this rank
            waited for it; whoever reads it puts an empty one in its place.
    """

    def __init__(
        self, address: int, rank: int, size: int, spins: int, placement: Placement
    ) -> None:
        self._address, self._size, self._spins = address, size, spins
        self._placement = placement
        self._glances = min(spins, _GLANCES)
        self.waited: dict[int, int] = {}
        self._from = [self._at(peer, rank) for peer in range(size)]
        # what runs for each short operation is here without a call of a method in between
        self._post, self._try = libraries()[0].sem_post, libraries()[0].sem_trywait
        self._to_at = [self._address_of(rank, peer) for peer in range(size)]
        self._from_at = [self._address_of(peer, rank) for peer in range(size)]

    def _address_of(self, source: int, target: int) -> ctypes.c_void_p:
        place = source * self._size + target
        return ctypes.c_void_p(self._address + SEMAPHORE_BYTES * place)

    def _at(self, source: int, target: int) -> Semaphore:
        yields = _YIELDS if self._spins == 1 else None
        is_beside = partial(self._placement.is_beside, source)
        return Semaphore(self._address_of(source, target), self._spins, yields, is_beside)

    def create(self) -> None:
        """Initialize all of them: on one rank, before any other uses them."""
        for source in range(self._size):
            for target in range(self._size):
                self._at(source, target).create(0)

    def post(self, peers: Sequence[int]) -> None:
        """Post the semaphores from this rank to these peers."""
        post, to = self._post, self._to_at
        for peer in peers:
            post(to[peer])

    def posted(self, peer: int) -> bool:
        """Whether the semaphore from `peer` has a post that was not yet waited for."""
        return self._from[peer].value() > 0

    def wait(self, peers: Sequence[int], poll: Callable[[Sequence[int]], None]) -> None:
        """Wait for one post of each peer.

        Args:
            peers: Their ranks.
            poll: Called every 50 ms with the peers whose post is missing; raises to end the wait.
        """
        attempt, glances = self._try, range(self._glances)
        for i, peer in enumerate(peers):
            at = self._from_at[peer]
            for _ in glances:
                if attempt(at) == 0:
                    break
            else:
                self._wait_long(peer, peers[i:], poll)

    def barrier(
        self, peers: Sequence[int], poll: Callable[[Sequence[int]], None]
    ) -> tuple[Callable[[], None], Callable[[], None]]:
        """`post` and `wait` as functions without arguments, for what is called again and again."""
        post, attempt, glances = self._post, self._try, range(self._glances)
        to = [self._to_at[peer] for peer in peers]
        places = [(i, self._from_at[peer]) for i, peer in enumerate(peers)]

        def post_all() -> None:
            for at in to:
                post(at)

        def wait_for_all() -> None:
            for i, at in places:
                for _ in glances:
                    if attempt(at) == 0:
                        break
                else:
                    self._wait_long(peers[i], peers[i:], poll)

        return post_all, wait_for_all

    def _wait_long(
        self, peer: int, missing: Sequence[int], poll: Callable[[Sequence[int]], None]
    ) -> None:
        semaphore, since = self._from[peer], time.perf_counter_ns()
        try:
            while not semaphore.spin():
                if semaphore.sleep(_POLL_SECONDS):
                    break
                poll(missing)
        finally:
            waited = time.perf_counter_ns() - since
            self.waited[peer] = self.waited.get(peer, 0) + waited
