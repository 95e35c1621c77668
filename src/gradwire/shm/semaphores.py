"""Segment of a group, and waits between its processes, by POSIX semaphores in the segment.

A post orders the memory written before it, on every CPU; flags in shared memory would not on ARM,
and waiting on sockets costs 60 µs each way. A waiting rank spins for about 30 µs, within which
short operations end. Then, if the main thread has nothing else to do, it yields its core between
attempts for 0.3 ms. Then it sleeps in the kernel without the GIL. Every 50 ms the caller checks for
lost peers and the deadline (`Semaphores.poll`).

A rank on the same core as the rank that it waits for yields at once instead of spinning: beside a
process that keeps the other core busy, an all_reduce of 4 bytes then takes 55 µs instead of 73, a
message and its answer 115 instead of 155. Yielding at once on other cores would give that process
the core for ms. If there are fewer cores than ranks, ranks do not spin either, but yield a few
times: if the post comes meanwhile, no rank must be woken.
"""

from __future__ import annotations

import ctypes
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from functools import cache, partial
from typing import Any

import torch

from gradwire._limits import cores
from gradwire._processes import Deadline
from gradwire.errors import CollectiveTimeoutError, DistributedError, PeerLostError
from gradwire.shm import segment
from gradwire.shm.header import TABLES_AT, header_bytes

SEMAPHORE_BYTES = 64
"""Bytes of a semaphore, more than any sem_t: a cache line."""

_SPINS = 200  # about 30 µs; more would block other threads, as spinning holds the GIL
_MORE_SPINS = 600  # about 90 µs, the time of a sleep and a wake-up
_YIELD_SECONDS = 300e-6  # about the time of a wake-up on a virtual machine
_CLOCK_MONOTONIC = time.CLOCK_MONOTONIC if sys.platform == "linux" else 1


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class MainThread:
    """State of the main thread, while it waits for another thread, which may then yield."""

    # An asynchronous all_reduce that is waited for at once then takes 0.6 to 0.94 of the time
    # between four ranks on two cores, and 0.97 to 1 between two.
    # condition that it waits for; not an Event: a signal handler may wait as well amid setting it
    awaited: Callable[[], bool] | None = None


def has_semaphores() -> bool:
    """Return True if the C library has `sem_clockwait` (glibc 2.30 or newer)."""
    return hasattr(ctypes.CDLL(None), "sem_clockwait")


def spins_for(others: Collection[int]) -> int:
    """Return how often a rank tries a semaphore before it yields or sleeps."""
    # with fewer cores than ranks, a spinning rank may occupy the core of the one it waits for
    return _SPINS if len(others) < cores(others) else 1


def spins_beside(other: int) -> int:
    """Return `spins_for` for a wait for one rank when there are fewer cores than ranks."""
    # A rank that can only run on other cores is not disturbed by spinning, and if it runs, answers
    # a message within the time of a sleep. Between 4, 8, and 16 ranks pinned to two cores, messages
    # of 4 bytes then take 0.67, 0.65 and 0.66 of the time, messages of 1 MiB 0.7 to 1, and a
    # message through all ranks in turn 1 to 1.17. Between ranks that are not pinned it would take
    # 1.2 to 1.3.
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
    """Semaphore in shared memory."""

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
        # `yields`: number of yields before sleeping; None for 0.3 ms of yields. Only then is
        # `is_beside` called, which returns True if the posting rank is probably on the same core:
        # attempts are useless before it gets the core.
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
        """Decrement the value as soon as it is not zero; return False if that takes longer."""
        # A signal handler may raise after the value was decremented.
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
        """Try for 0.3 ms, or `yields` times, yielding the core between attempts."""
        # Do so only in the main thread, or while it waits for another one: otherwise the group's
        # thread would take the GIL from it at each attempt.
        if MainThread.awaited is None and threading.current_thread() is not threading.main_thread():
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


_INLINE_BYTES, _LEAST = 512 << 10, 32 << 10
"""Inline bytes of all ranks together, and the minimum for one rank. Data beside the header takes
one wait instead of two or more: between two ranks an all_reduce of 64 KiB takes 33 us instead of
90, one of 256 KiB 85 to 110 instead of 125 to 190, and one of 512 KiB the same time."""

PLACE_BYTES = 64
"""Bytes for one rank: a cache line, as each rank writes its own."""

_GLANCES = 16  # about 3 µs; reading the clock and recording a shorter wait would take 1 µs
_YIELDS = 30
"""Number of yields of a rank that does not spin. all_reduce of 4 KiB between 3, 4, 8 and 16
ranks on two cores took 31, 54, 165 and 560 µs instead of 50, 105, 250 and 700; with 10 yields the
same, except between 3 ranks (46). If the kernel returns the core at once, it costs 25 µs a wait."""
_POLL_SECONDS = 0.05


class GroupSegment:
    """Segment of a group in this process: rank 0 allocates it, and sends it to the others."""

    def __init__(
        self, rank: int, peers: dict[int, socket.socket], spins: int, deadline: Deadline
    ) -> None:
        # It holds the semaphores, the ranks' cores and, for each rank, two headers with short data
        # ("inline") beside them. There are two because a fast rank may begin the next collective
        # while a slow one still reads the headers of the last. It cannot begin the one after that,
        # which needs a post of the slow rank.
        ranks = len(peers) + 1
        places_at, header = SEMAPHORE_BYTES * ranks * ranks, header_bytes(ranks)
        headers_at = places_at + PLACE_BYTES * ranks
        inline_at = (headers_at + 2 * ranks * header + 4095) // 4096 * 4096
        inline_bytes = max(_LEAST, _INLINE_BYTES // ranks // 4096 * 4096)
        size = inline_at + 2 * ranks * inline_bytes
        try:
            # rank 0 initializes the semaphores before any other rank has the descriptor
            fd = segment.create(size) if rank == 0 else _receive_segment(peers[0], size, deadline)
            try:
                memory = segment.Mapping(fd)
                self.placement = Placement(memory.bytes[places_at:headers_at], rank)
                self.semaphores = Semaphores(
                    memory.flat.data_ptr(), rank, ranks, spins, self.placement
                )
                if rank == 0:
                    self.semaphores.create()
                    for peer in peers.values():
                        socket.send_fds(peer, [b"segment"], [fd])
            finally:
                os.close(fd)
        except TimeoutError as error:
            raise CollectiveTimeoutError(
                f"rank 0 did not form the group within {deadline.seconds:g} s"
            ) from error
        except ConnectionError as error:
            raise PeerLostError("a rank died or gave up while the group was formed") from error
        starts = range(headers_at, headers_at + 2 * ranks * header, header)
        headers = [memory.bytes[start : start + header] for start in starts]
        numbers = (
            memory.flat[headers_at : starts.stop].view(torch.int64).view(2, ranks, header // 8)
        )
        tables = numbers[..., TABLES_AT : TABLES_AT + 2 * ranks].split(ranks, dim=2)
        inline = memory.flat[inline_at:].view(2, ranks, inline_bytes)
        # each for even and for odd collectives, and by rank
        self.headers = [headers[:ranks], headers[ranks:]]
        # elements that each rank sends to each other, and that each expects from each other, by
        # sender and receiver
        self.tables = [(sent, expected.t()) for sent, expected in zip(*tables, strict=True)]
        self.inline = [half.unbind(0) for half in inline]


def _receive_segment(rank_0: socket.socket, size: int, deadline: Deadline) -> int:
    rank_0.settimeout(deadline.left())
    _, fds, _, _ = socket.recv_fds(rank_0, 16, 1, socket.MSG_CMSG_CLOEXEC)
    if not fds:
        raise PeerLostError("rank 0 died or gave up while the group was formed")
    try:
        segment.check_sealed(fds[0], size)
    except DistributedError:
        os.close(fds[0])
        raise
    return fds[0]


class Placement:
    """Cores on which the ranks last waited, in shared memory."""

    def __init__(self, memory: memoryview, rank: int) -> None:
        # `PLACE_BYTES` for each rank, zero when the group forms
        self._places = memory.cast("i")
        self._stride = PLACE_BYTES // self._places.itemsize
        self._own = rank * self._stride
        self._core = ctypes.PyDLL(None).sched_getcpu

    def is_beside(self, peer: int) -> bool:
        """Record this thread's core; return True if the peer's recorded core is the same."""
        # The kernel puts two ranks on one core while another process keeps the other cores busy,
        # and for some ms after they were idle. The entries are hints that affect only speed, so
        # reads and writes are unordered.
        here: int = self._core() + 1  # 0: a rank that has not waited yet
        self._places[self._own] = here
        return self._places[peer * self._stride] == here

    def close(self) -> None:
        """Release the memory; threads that still wait read a copy."""
        self._places = memoryview(bytearray(self._places)).cast("i")


class Semaphores:
    """Semaphores of a group as one rank uses them: one for each ordered pair of ranks."""

    def __init__(
        self, address: int, rank: int, size: int, spins: int, placement: Placement
    ) -> None:
        # address of the `size` × `size` semaphores in this process
        self._address, self._size, self._spins = address, size, spins
        self._placement = placement
        self._glances = min(spins, _GLANCES)
        # ns that this rank waited for each peer whose post took more than some µs; the reader
        # replaces it by an empty dict
        self.waited: dict[int, int] = {}
        # called every 50 ms of a wait with the peers whose posts are missing; raises to end the
        # wait
        self.poll: Callable[[Sequence[int]], None] = lambda missing: None
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

    def wait(self, peers: Sequence[int]) -> None:
        """Wait for one post of each peer."""
        attempt, glances, places = self._try, range(self._glances), self._from_at
        for i, peer in enumerate(peers):
            at = places[peer]
            for _ in glances:
                if attempt(at) == 0:
                    break
            else:
                self._wait_long(peer, peers[i:])

    def _wait_long(self, peer: int, missing: Sequence[int]) -> None:
        semaphore, since = self._from[peer], time.perf_counter_ns()
        try:
            while not semaphore.spin():
                if semaphore.sleep(_POLL_SECONDS):
                    break
                self.poll(missing)
        finally:
            waited = time.perf_counter_ns() - since
            self.waited[peer] = self.waited.get(peer, 0) + waited
