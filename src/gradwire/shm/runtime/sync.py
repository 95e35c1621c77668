"""Waits between processes, by POSIX semaphores in shared memory.

A post orders the memory written before it, on every CPU; flags in shared memory would not on ARM,
and waiting on sockets costs 60 µs each way. A waiting rank spins for about 30 µs, within which
short operations end. Then, if the main thread has nothing else to do, it yields its core between
attempts for 0.3 ms. Then it sleeps in the kernel without the GIL. Every 50 ms the caller checks for
lost peers and the deadline (`group_segment`).

A rank on the same core as the rank that it waits for yields at once instead of spinning: beside a
process that keeps the other core busy, an all_reduce of 4 bytes then takes 55 µs instead of 73, a
message and its answer 115 instead of 155. Yielding at once on other cores would give that process
the core for ms. If there are fewer cores than ranks, ranks do not spin either, but yield a few
times: if the post comes meanwhile, no rank must be woken.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from gradwire._limits import cores

SEMAPHORE_BYTES = 64
"""Bytes of a semaphore, more than any sem_t: a cache line."""

_SPINS = 200  # about 30 µs; more would block other threads, as spinning holds the GIL
_MORE_SPINS = 600  # about 90 µs, the time of a sleep and a wake-up
_YIELD_SECONDS = 300e-6  # about the time of a wake-up on a virtual machine
_CLOCK_MONOTONIC = time.CLOCK_MONOTONIC if sys.platform == "linux" else 1


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _MainThread:
    # condition that it waits for; not an Event: a signal handler may wait as well amid setting it
    awaited: Callable[[], bool] | None = None


@contextmanager
def main_thread_waits(done: Callable[[], bool]) -> Iterator[None]:
    """Declare that the main thread waits in the block for another thread, which may then yield.

    An asynchronous all_reduce that is waited for at once then takes 0.6 to 0.94 of the time between
    four ranks on two cores, and 0.97 to 1 between two.

    Args:
        done: Condition that the other thread makes true.
    """
    _MainThread.awaited = done
    try:
        yield
    finally:
        _MainThread.awaited = None


def main_thread_awaits(done: Callable[[], bool]) -> bool:
    """Return True if the main thread waits for this condition."""
    return _MainThread.awaited == done


def has_semaphores() -> bool:
    """Return True if the C library has `sem_clockwait` (glibc 2.30 or newer)."""
    return hasattr(ctypes.CDLL(None), "sem_clockwait")


def spins_for(others: Collection[int]) -> int:
    """Return how often a rank tries a semaphore before it yields or sleeps.

    Args:
        others: Processes of the other ranks. The cores of all processes count together, as
            launchers may pin each to a core of its own.
    """
    # with fewer cores than ranks, a spinning rank may occupy the core of the one it waits for
    return _SPINS if len(others) < cores(others) else 1


def spins_beside(other: int) -> int:
    """Return `spins_for` for a wait for one rank when there are fewer cores than ranks.

    A rank that can only run on other cores is not disturbed by spinning, and if it runs, answers a
    message within the time of a sleep. Between 4, 8, and 16 ranks pinned to two cores, messages of
    4 bytes then take 0.67, 0.65 and 0.66 of the time, messages of 1 MiB 0.7 to 1, and a message
    through all ranks in turn 1 to 1.17. Between ranks that are not pinned it would take 1.2 to 1.3.

    Args:
        other: Process of the other rank; 0 if it has no pid in this process's namespace.
    """
    try:
        apart = os.sched_getaffinity(0).isdisjoint(os.sched_getaffinity(other))
    except OSError:  # the process has ended
        apart = False
    return _MORE_SPINS if apart else 1


@cache
def libraries() -> tuple[Any, Any]:
    """Return the C library twice: called with the GIL, for quick calls, and called without it."""
    return ctypes.PyDLL(None), ctypes.CDLL(None, use_errno=True)


class Semaphore:
    """Semaphore in shared memory.

    Args:
        yields: Number of yields before sleeping; None for 0.3 ms of yields.
        is_beside: Function that returns True if the posting rank is probably on the same core:
            then attempts are useless before it gets the core. Called only if `yields` is None.
    """

    def __init__(
        self,
        address: ctypes.c_void_p,
        spins: int,
        yields: int | None,
        is_beside: Callable[[], bool],
    ) -> None:
        quick, slow = libraries()
        self._post, self._try, self._get = quick.sem_post, quick.sem_trywait, quick.sem_getvalue
        self._wait, self._yield = slow.sem_clockwait, slow.sched_yield
        self._at, self._spins, self._yields, self._is_beside = address, spins, yields, is_beside
        self._value = ctypes.c_int()  # kept: making one takes longer than reading the semaphore
        self._value_at = ctypes.byref(self._value)

    def create(self, value: int) -> None:
        """Initialize the semaphore, before any other process uses it."""
        if libraries()[0].sem_init(self._at, 1, value) != 0:
            raise OSError("sem_init failed: this system does not support process-shared semaphores")

    def post(self) -> None:
        """Increment the value."""
        self._post(self._at)

    def try_wait(self) -> bool:
        """Decrement the value if it is not zero; return False if it is."""
        taken: bool = self._try(self._at) == 0
        return taken

    def value(self) -> int:
        """Return the current value."""
        self._get(self._at, self._value_at)
        return self._value.value  # possibly a later value, if another thread called this meanwhile

    def wait(self, seconds: float) -> bool:
        """Decrement the value as soon as it is not zero; return False if that takes longer.

        A signal handler may raise after the value was decremented.
        """
        return self.spin() or self.sleep(seconds)

    def can_try(self) -> bool:
        """Return True if spinning is useful: the posting rank does not need this rank's core."""
        return self._yields is not None or not self._is_beside()

    def spin(self) -> bool:
        """Wait without sleeping; return False if the value stayed zero."""
        if self.can_try():
            attempt, at = self._try, self._at
            for _ in range(self._spins):
                if attempt(at) == 0:
                    return True
        return self._yielded()

    def _yielded(self) -> bool:
        """Try for 0.3 ms, or `yields` times, yielding the core between attempts.

        Do so only in the main thread, or while it waits for another one: otherwise the group's
        thread would take the GIL from it at each attempt.
        """
        if (
            _MainThread.awaited is None
            and threading.current_thread() is not threading.main_thread()
        ):
            return False
        if self._yields is not None:
            for _ in range(self._yields):
                self._yield()
                if self._try(self._at) == 0:
                    return True
            return False
        end = time.monotonic() + _YIELD_SECONDS
        while time.monotonic() < end:
            self._yield()
            if self._try(self._at) == 0:
                return True
        return False

    def sleep(self, seconds: float) -> bool:
        """Wait without spinning."""
        until = time.monotonic() + seconds
        spec = _Timespec(int(until), int(until % 1 * 1e9))
        taken: bool = self._wait(self._at, _CLOCK_MONOTONIC, ctypes.byref(spec)) == 0
        return taken
