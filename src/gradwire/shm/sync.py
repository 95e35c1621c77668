"""Waiting for each other, by POSIX semaphores in shared memory.

A post orders the memory written before it, on every CPU; flags in shared memory would not on ARM,
and waiting on sockets costs 60 µs each way. A waiting rank spins for about 30 µs, within which
short operations end; then, if the main thread has nothing else to do, it yields its core between
tries for 0.3 ms; then it sleeps in the kernel without the GIL. Every 50 ms it checks for lost peers
and the deadline.

A rank on the same core as the one it waits for does not spin, but yields at once: beside a process
that keeps the other core busy, an all_reduce of 4 bytes takes 55 µs instead of 73 so, a message
there and back 115 instead of 155. To yield at once on other cores would give that process the core
for ms. Ranks that are more than their cores do not spin either, but yield a few times: where what
is waited for comes meanwhile, nobody has to be woken.
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

from gradwire.shm.limits import cores

SEMAPHORE_BYTES = 64
"""More than a sem_t takes anywhere: a cache line for each."""

_SPINS = 200  # about 30 µs; more would keep other threads from the GIL
_MORE_SPINS = 600  # about 90 µs, which is what sleeping and being woken takes
_YIELD_SECONDS = 300e-6  # about as long as waking up takes on a virtual machine
_CLOCK_MONOTONIC = time.CLOCK_MONOTONIC if sys.platform == "linux" else 1


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _MainThread:
    # what it waits for to be true; no Event: a handler of a signal may wait, too, amid setting it
    awaited: Callable[[], bool] | None = None


@contextmanager
def main_thread_waits(done: Callable[[], bool]) -> Iterator[None]:
    """In the block, the main thread waits for another one, which may then yield.

    Args:
        done: What that one makes true.

    An asynchronous all_reduce that is waited for at once takes 0.6 to 0.94 of the time so between
    four ranks on two cores, 0.97 to 1 between two.
    """
    _MainThread.awaited = done
    try:
        yield
    finally:
        _MainThread.awaited = None


def main_thread_awaits(done: Callable[[], bool]) -> bool:
    """Whether the main thread waits for this to be true."""
    return _MainThread.awaited == done


def has_semaphores() -> bool:
    """Whether the C library has `sem_clockwait` (glibc 2.30 or newer)."""
    return hasattr(ctypes.CDLL(None), "sem_clockwait")


class Deadline:
    """A point in time by which an operation must be done.

    Args:
        seconds: From now on; None for no limit.
    """

    __slots__ = ("_end", "seconds")

    def __init__(self, seconds: float | None) -> None:
        self.seconds = seconds
        self._end = None if seconds is None else time.monotonic() + seconds

    def over(self) -> bool:
        """Whether it has passed."""
        return self._end is not None and time.monotonic() >= self._end

    def left(self) -> float | None:
        """Seconds until then, ≥ 0; None for no limit."""
        return None if self._end is None else max(0.0, self._end - time.monotonic())


def spins_for(others: Collection[int]) -> int:
    """How often a rank tries a semaphore before it yields or sleeps.

    Args:
        others: The processes of the other ranks. Launchers pin each to a core of its own: what
            counts is what all have together.
    """
    # with fewer cores than ranks, a spinning rank may keep the core of the one it waits for
    return _SPINS if len(others) < cores(others) else 1


def spins_beside(other: int) -> int:
    """As `spins_for`, where ranks are more than their cores and one of them alone is waited for.

    One that can only run on other cores is not kept from them, and answers a message within the
    time that a sleep takes, if it runs: of 4, 8, and 16 ranks pinned to two cores, messages of 4
    bytes take 0.67, 0.65 and 0.66 of the time, of 1 MiB 0.7 to 1, and through all ranks in turn 1
    to 1.17. Between ranks that are not pinned it takes 1.2 to 1.3.

    Args:
        other: Its process; 0 if it has no number in this one's namespace.
    """
    try:
        apart = os.sched_getaffinity(0).isdisjoint(os.sched_getaffinity(other))
    except OSError:  # it has ended
        apart = False
    return _MORE_SPINS if apart else 1


@cache
def libraries() -> tuple[Any, Any]:
    """The C library, to call with the GIL, for calls that return at once, and without it."""
    return ctypes.PyDLL(None), ctypes.CDLL(None, use_errno=True)


class Semaphore:
    """One semaphore in shared memory.

    Args:
        address: Where it lies in this process.
        spins: How often to try before yielding or sleeping.
        yields: How often to yield before sleeping; None for as often as 0.3 ms allow.
        is_beside: Whether who will post it is on the same core, as far as is known: trying is of no
            use then before it is given the core. Asked only if `yields` is None.
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
        self._value = ctypes.c_int()  # kept, as making one takes longer than to read the semaphore
        self._value_at = ctypes.byref(self._value)

    def create(self, value: int) -> None:
        """Initialize it: before any other process uses it."""
        if libraries()[0].sem_init(self._at, 1, value) != 0:
            raise OSError("sem_init failed: this system has no process-shared semaphores")

    def post(self) -> None:
        """Add one to its value."""
        self._post(self._at)

    def try_wait(self) -> bool:
        """Take one from its value, if it is not zero; whether it did."""
        taken: bool = self._try(self._at) == 0
        return taken

    def value(self) -> int:
        """Its value at this moment."""
        self._get(self._at, self._value_at)
        return self._value.value  # or, if another thread asked meanwhile, at a later one

    def wait(self, seconds: float) -> bool:
        """Take one from its value as soon as it is not zero; False if that takes longer.

        An exception of a signal's handler may be raised after it took one.
        """
        return self.spin() or self.sleep(seconds)

    def can_try(self) -> bool:
        """Whether it may be posted while this rank tries, which keeps its core."""
        return self._yields is not None or not self._is_beside()

    def spin(self) -> bool:
        """Take one from its value, as `wait` does, without sleeping; whether it took one."""
        if self.can_try():
            attempt, at = self._try, self._at
            for _ in range(self._spins):
                if attempt(at) == 0:
                    return True
        return self._yielded()

    def _yielded(self) -> bool:
        """Try for 0.3 ms, or some times, yielding the core between tries; whether it took one.

        In the main thread, or while it waits for another one; else the group's thread would take
        the GIL from it at each try.
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
        """As `wait`, without spinning."""
        until = time.monotonic() + seconds
        spec = _Timespec(int(until), int(until % 1 * 1e9))
        taken: bool = self._wait(self._at, _CLOCK_MONOTONIC, ctypes.byref(spec)) == 0
        return taken
