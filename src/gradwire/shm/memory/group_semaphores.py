"""Waits between the ranks of a group."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from functools import partial

from gradwire.shm.runtime.sync import SEMAPHORE_BYTES, Semaphore, libraries

PLACE_BYTES = 64
"""Bytes for one rank: a cache line, as each rank writes its own."""


class Placement:
    """Cores on which the ranks last waited, in shared memory.

    A rank reads here whether it occupies the core of the rank that it waits for. The kernel puts
    two ranks on one core while another process keeps the other cores busy, and for some ms after
    they were idle. The entries are hints that affect only speed, so reads and writes are unordered.

    Args:
        memory: `PLACE_BYTES` for each rank, zero when the group forms.
        rank: Rank of this process.
    """

    def __init__(self, memory: memoryview, rank: int) -> None:
        self._places = memory.cast("i")
        self._stride = PLACE_BYTES // self._places.itemsize
        self._own = rank * self._stride
        self._core = ctypes.PyDLL(None).sched_getcpu

    def is_beside(self, peer: int) -> bool:
        """Record this thread's core; return True if the peer's recorded core is the same."""
        here: int = self._core() + 1  # 0: a rank that has not waited yet
        self._places[self._own] = here
        return self._places[peer * self._stride] == here

    def close(self) -> None:
        """Release the memory; threads that still wait read a copy."""
        self._places = memoryview(bytearray(self._places)).cast("i")


_GLANCES = 16  # about 3 µs; reading the clock and recording a shorter wait would take 1 µs
_YIELDS = 30
"""Number of yields of a rank that does not spin. all_reduce of 4 KiB between 3, 4, 8 and 16
ranks on two cores took 31, 54, 165 and 560 µs instead of 50, 105, 250 and 700; with 10 yields the
same, except between 3 ranks (46). If the kernel returns the core at once, it costs 25 µs a wait."""
_POLL_SECONDS = 0.05


class Semaphores:
    """Semaphores of a group as one rank uses them: one for each ordered pair of ranks.

    Args:
        address: Address of the `size` × `size` semaphores in this process.
        rank: Rank of this process.
        size: Number of ranks.
        spins: Number of attempts before yielding or sleeping.
        placement: Cores of the ranks.

    Attributes:
        waited: Nanoseconds that this rank waited for each peer whose post took more than some µs;
            the reader replaces it by an empty dict.
    """

    def __init__(
        self, address: int, rank: int, size: int, spins: int, placement: Placement
    ) -> None:
        self._address, self._size, self._spins = address, size, spins
        self._placement = placement
        self._glances = min(spins, _GLANCES)
        self.waited: dict[int, int] = {}
        self._from = [self._at(peer, rank) for peer in range(size)]
        # short operations use these without a method call in between
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
        """Initialize all semaphores, on one rank, before any other rank uses them."""
        for source in range(self._size):
            for target in range(self._size):
                self._at(source, target).create(0)

    def post(self, peers: Sequence[int]) -> None:
        """Post the semaphores from this rank to these peers."""
        post, to = self._post, self._to_at
        for peer in peers:
            post(to[peer])

    def posted(self, peer: int) -> bool:
        """Return True if the semaphore from `peer` has a post that was not waited for yet."""
        return self._from[peer].value() > 0

    def wait(self, peers: Sequence[int], poll: Callable[[Sequence[int]], None]) -> None:
        """Wait for one post of each peer.

        Args:
            peers: Ranks of the peers.
            poll: Function called every 50 ms with the peers whose posts are missing; it raises to
                end the wait.
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
        """Return `post` and `wait` for these peers as functions without arguments."""
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
