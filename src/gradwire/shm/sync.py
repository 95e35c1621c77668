"""Waiting for each other, by POSIX semaphores in shared memory.

A post orders the memory written before it, on every CPU; flags in shared memory would not on ARM,
and waiting on sockets costs 60 µs each way. A waiting rank spins for about 30 µs, within which
short operations end; then, if the main thread has nothing else to do, it yields its core between
tries for 0.3 ms; then it sleeps in the kernel without the GIL. Every 50 ms it checks for lost peers
and the deadline.

Ranks that share cores do not spin, but yield a few times: where what is waited for comes meanwhile,
nobody has to be woken.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

from gradwire.shm.cgroups import cores

__all__ = [
    "SEMAPHORE_BYTES",
    "Deadline",
    "Semaphore",
    "Semaphores",
    "has_semaphores",
    "main_thread_waits",
    "spins_beside",
    "spins_for",
]

SEMAPHORE_BYTES = 64
"""More than a sem_t takes anywhere: a cache line for each."""

_SPINS = 200  # about 30 µs; more would keep other threads from the GIL
_MORE_SPINS = 600  # about 90 µs, which is what sleeping and being woken takes
_GLANCES = 16  # about 3 µs: to look at the clock and to note so short a wait takes 1 µs
_YIELD_SECONDS = 300e-6  # about as long as waking up takes on a virtual machine
_YIELDS = 30
"""How often a rank that does not spin yields. A prepared all_reduce of 4 KiB between 3, 4, 8 and 16
ranks on two cores takes 31, 54, 165 and 560 µs instead of 50, 105, 250 and 700; with 10 it is as
much but for 3 ranks (46). Where the kernel gives the core back at once, it costs 25 µs a wait."""
_POLL_SECONDS = 0.05
_CLOCK_MONOTONIC = time.CLOCK_MONOTONIC if sys.platform == "linux" else 1


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _MainThread:
    waits = False  # no Event: a handler of a signal may wait, too, amid setting it


@contextmanager
def main_thread_waits() -> Iterator[None]:
    """In the block, the main thread waits for another one, which may then yield.

    An asynchronous all_reduce that is waited for at once takes 0.6 to 0.94 of the time so between
    four ranks on two cores, 0.97 to 1 between two.
    """
    _MainThread.waits = True
    try:
        yield
    finally:
        _MainThread.waits = False


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
def _libraries() -> tuple[Any, Any]:
    """The C library, to call with the GIL, for calls that return at once, and without it."""
    return ctypes.PyDLL(None), ctypes.CDLL(None, use_errno=True)


class Semaphore:
    """One semaphore in shared memory.

    Args:
        address: Where it lies in this process.
        spins: How often to try before yielding or sleeping.
        yields: How often to yield before sleeping; None for as often as 0.3 ms allow.
    """

    def __init__(self, address: ctypes.c_void_p, spins: int, yields: int | None) -> None:
        quick, slow = _libraries()
        self._post, self._try, self._get = quick.sem_post, quick.sem_trywait, quick.sem_getvalue
        self._wait, self._yield = slow.sem_clockwait, slow.sched_yield
        self._at, self._spins, self._yields = address, spins, yields

    def create(self, value: int) -> None:
        """Initialize it: before any other process uses it."""
        if _libraries()[0].sem_init(self._at, 1, value) != 0:
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
        value = ctypes.c_int()
        self._get(self._at, ctypes.byref(value))
        return value.value

    def wait(self, seconds: float) -> bool:
        """Take one from its value as soon as it is not zero; False if that takes longer.

        An exception of a signal's handler may be raised after it took one.
        """
        return self.spin() or self.sleep(seconds)

    def spin(self) -> bool:
        """Take one from its value, as `wait` does, without sleeping; whether it took one."""
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
        if not _MainThread.waits and threading.current_thread() is not threading.main_thread():
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


def _do_nothing(_: int) -> None:
    pass


class Semaphores:
    """The semaphores of a group, as one rank uses them: one for each ordered pair of ranks.

    Args:
        address: Where the `size` × `size` semaphores lie in this process.
        rank: This rank.
        size: How many ranks.
        spins: How often to try before yielding or sleeping.

    Attributes:
        waited: For each peer whose post was not there within some µs, for how many ns this rank
            waited for it; whoever reads it puts an empty one in its place.
        before_sleep: Called before each sleep, with the peer whose post is missing.
    """

    def __init__(self, address: int, rank: int, size: int, spins: int) -> None:
        self._address, self._size, self._spins = address, size, spins
        self._glances = min(spins, _GLANCES)
        self.waited: dict[int, int] = {}
        self.before_sleep: Callable[[int], None] = _do_nothing
        self._from = [self._at(peer, rank) for peer in range(size)]
        # what runs for each short operation is here without a call of a method in between
        self._post, self._try = _libraries()[0].sem_post, _libraries()[0].sem_trywait
        self._to_at = [self._address_of(rank, peer) for peer in range(size)]
        self._from_at = [self._address_of(peer, rank) for peer in range(size)]

    def _address_of(self, source: int, target: int) -> ctypes.c_void_p:
        place = source * self._size + target
        return ctypes.c_void_p(self._address + SEMAPHORE_BYTES * place)

    def _at(self, source: int, target: int) -> Semaphore:
        yields = _YIELDS if self._spins == 1 else None
        return Semaphore(self._address_of(source, target), self._spins, yields)

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
                self.before_sleep(peer)
                if semaphore.sleep(_POLL_SECONDS):
                    break
                poll(missing)
        finally:
            waited = time.perf_counter_ns() - since
            self.waited[peer] = self.waited.get(peer, 0) + waited
