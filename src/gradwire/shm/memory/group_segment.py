"""Segment of a group: allocated by rank 0, and received by the others over their connections.

It holds the semaphores, the ranks' cores and, for each rank, two headers with short data ("inline")
beside them. There are two because a fast rank may begin the next collective while a slow one still
reads the headers of the last. It cannot begin the one after that, which needs a post of the slow
rank.
"""

from __future__ import annotations

import ctypes
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from gradwire._processes import Deadline
from gradwire.errors import CollectiveTimeoutError, DistributedError, PeerLostError
from gradwire.shm.memory import segment
from gradwire.shm.memory.header import TABLES_AT, header_bytes
from gradwire.shm.runtime.sync import SEMAPHORE_BYTES, Semaphore, libraries

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


@dataclass(frozen=True)
class GroupSegment:
    """Segment of a group, as this process maps it.

    Attributes:
        semaphores: Semaphores of the group.
        placement: Cores of the ranks.
        headers: Header of each rank, for even and for odd collectives.
        tables: Number of elements that each rank sends to each other, and that each expects from
            each other, as int64 tensors by sender and receiver; for even and odd collectives.
        inline: Memory of the data beside each header, as uint8 tensors; for even and odd
            collectives.
    """

    semaphores: Semaphores
    placement: Placement
    headers: list[list[memoryview]]
    tables: list[tuple[Tensor, Tensor]]
    inline: list[tuple[Tensor, ...]]


def form(
    rank: int, peers: dict[int, socket.socket], spins: int, deadline: Deadline
) -> GroupSegment:
    """Allocate the group's segment on rank 0, and receive it on the others.

    Raises:
        PeerLostError, CollectiveTimeoutError: Rank 0 did not send it, or a rank is gone.
        DistributedError: There is not enough memory.
    """
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
            placement = Placement(memory.bytes[places_at:headers_at], rank)
            semaphores = Semaphores(memory.flat.data_ptr(), rank, ranks, spins, placement)
            if rank == 0:
                semaphores.create()
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
    numbers = memory.flat[headers_at : starts.stop].view(torch.int64).view(2, ranks, header // 8)
    tables = numbers[..., TABLES_AT : TABLES_AT + 2 * ranks].split(ranks, dim=2)
    inline = memory.flat[inline_at:].view(2, ranks, inline_bytes)
    return GroupSegment(
        semaphores,
        placement,
        [headers[:ranks], headers[ranks:]],
        [(sent, expected.t()) for sent, expected in zip(*tables, strict=True)],
        [half.unbind(0) for half in inline],
    )


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
    """Cores on which the ranks last waited, in shared memory.

    A rank reads here whether it occupies the core of the rank that it waits for. The kernel puts
    two ranks on one core while another process keeps the other cores busy, and for some ms after
    they were idle. The entries are hints that affect only speed, so reads and writes are unordered.

    Args:
        memory: `PLACE_BYTES` for each rank, zero when the group forms.
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


class Semaphores:
    """Semaphores of a group as one rank uses them: one for each ordered pair of ranks.

    Args:
        address: Address of the `size` × `size` semaphores in this process.

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
