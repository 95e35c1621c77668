"""Waiting for each other: one POSIX semaphore for each ordered pair of ranks.

A post orders the memory written before it, on every CPU; flags in shared memory would not on ARM,
and waiting on sockets costs 60 µs each way. A waiting rank spins for about 30 µs, within which
short operations end; then, in the main thread, it yields its core between tries for 0.3 ms; then it
sleeps in the kernel without the GIL. Every 50 ms it checks for lost peers and the deadline.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections.abc import Callable, Sequence

from gradwire.shm.cgroups import cores

__all__ = ["SEMAPHORE_BYTES", "Deadline", "Semaphores", "has_semaphores"]

SEMAPHORE_BYTES = 64
"""More than a sem_t takes anywhere: a cache line for each."""

_SPINS = 200  # about 30 µs; more would keep other threads from the GIL
_YIELD_SECONDS = 300e-6  # about as long as waking up takes on a virtual machine
_POLL_SECONDS = 0.05
_CLOCK_MONOTONIC = time.CLOCK_MONOTONIC if sys.platform == "linux" else 1


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def has_semaphores() -> bool:
    """Whether the C library has `sem_clockwait` (glibc 2.30 or newer)."""
    return hasattr(ctypes.CDLL(None), "sem_clockwait")


class Deadline:
    """A point in time by which an operation must be done.

    Args:
        seconds: From now on; None for no limit.
    """

    def __init__(self, seconds: float | None) -> None:
        self.seconds = seconds
        self._end = None if seconds is None else time.monotonic() + seconds

    def over(self) -> bool:
        """Whether it has passed."""
        return self._end is not None and time.monotonic() >= self._end

    def left(self) -> float | None:
        """Seconds until then, ≥ 0; None for no limit."""
        return None if self._end is None else max(0.0, self._end - time.monotonic())


class Semaphores:
    """The semaphores of a group, as one rank uses them.

    Args:
        address: Where the `size` × `size` semaphores lie in this process.
        rank: This rank.
        size: How many ranks.
    """

    def __init__(self, address: int, rank: int, size: int) -> None:
        # PyDLL keeps the GIL, for calls that return at once; CDLL releases it, for those that wait
        quick, slow = ctypes.PyDLL(None), ctypes.CDLL(None, use_errno=True)
        self._init, self._post, self._try = quick.sem_init, quick.sem_post, quick.sem_trywait
        self._value, self._wait = quick.sem_getvalue, slow.sem_clockwait
        self._yield = slow.sched_yield
        self._address, self._size = address, size
        self._to = [self._at(rank, peer) for peer in range(size)]
        self._from = [self._at(peer, rank) for peer in range(size)]
        # with fewer cores than ranks, a spinning rank may keep the core of the one it waits for
        self._spins = _SPINS if size <= cores() else 1

    def _at(self, source: int, target: int) -> ctypes.c_void_p:
        place = source * self._size + target
        return ctypes.c_void_p(self._address + SEMAPHORE_BYTES * place)

    def create(self) -> None:
        """Initialize all of them: on one rank, before any other uses them."""
        for source in range(self._size):
            for target in range(self._size):
                if self._init(self._at(source, target), 1, 0) != 0:
                    raise OSError("sem_init failed: this system has no process-shared semaphores")

    def post(self, peers: Sequence[int]) -> None:
        """Post the semaphores from this rank to these peers."""
        post, to = self._post, self._to
        for peer in peers:
            post(to[peer])

    def posted(self, peer: int) -> bool:
        """Whether the semaphore from `peer` has a post that was not yet waited for."""
        value = ctypes.c_int()
        self._value(self._from[peer], ctypes.byref(value))
        return value.value > 0

    def wait(self, peers: Sequence[int], poll: Callable[[Sequence[int]], None]) -> None:
        """Wait for one post of each peer.

        Args:
            peers: Their ranks.
            poll: Called every 50 ms with the peers whose post is missing; raises to end the wait.
        """
        attempt, sources = self._try, self._from
        for i, peer in enumerate(peers):
            source = sources[peer]
            for _ in range(self._spins):
                if attempt(source) == 0:
                    break
            else:
                if not self._yielded(source):
                    self._sleep(source, peers[i:], poll)

    def _yielded(self, source: ctypes.c_void_p) -> bool:
        """Try for 0.3 ms, yielding the core between tries; whether a post came.

        In the main thread alone, which has nothing else to do; the group's thread would take the
        GIL from it at each try.
        """
        if self._spins == 1 or threading.current_thread() is not threading.main_thread():
            return False
        end = time.monotonic() + _YIELD_SECONDS
        while time.monotonic() < end:
            self._yield()
            if self._try(source) == 0:
                return True
        return False

    def _sleep(
        self,
        source: ctypes.c_void_p,
        missing: Sequence[int],
        poll: Callable[[Sequence[int]], None],
    ) -> None:
        while True:
            until = time.monotonic() + _POLL_SECONDS
            spec = _Timespec(int(until), int(until % 1 * 1e9))
            if self._wait(source, _CLOCK_MONOTONIC, ctypes.byref(spec)) == 0:
                return
            poll(missing)
