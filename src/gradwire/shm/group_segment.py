"""The group's segment: made by rank 0, received by the others over their connections.

It holds the semaphores and, twice over, a header and a short piece of data ("inline") for each
rank. Twice, because a fast rank may begin the next collective while a slow one still reads the
headers of the last; it cannot begin the one after that, which takes a post of the slow one.
"""

from __future__ import annotations

import os
import socket

from gradwire.errors import CollectiveTimeoutError, DistributedError, PeerLostError
from gradwire.shm import segment
from gradwire.shm.header import header_bytes
from gradwire.shm.sync import SEMAPHORE_BYTES, Deadline, Semaphores

__all__ = ["INLINE_BYTES", "Layout", "form"]

INLINE_BYTES = 32 << 10
"""Up to here data travels with the header: one wait instead of two or more."""


class Layout:
    """Byte offsets in the segment of a group of `size` ranks."""

    def __init__(self, size: int) -> None:
        self._ranks = size
        self.header_bytes = header_bytes(size)
        self._headers = SEMAPHORE_BYTES * size * size
        self._inlines = (self._headers + 2 * size * self.header_bytes + 4095) // 4096 * 4096
        self.size = self._inlines + 2 * size * INLINE_BYTES

    def header(self, parity: int, rank: int) -> int:
        """Where a rank's header of the even or odd collectives begins."""
        return self._headers + (parity * self._ranks + rank) * self.header_bytes

    def inline(self, parity: int, rank: int) -> int:
        """Where the data that travels with that header begins."""
        return self._inlines + (parity * self._ranks + rank) * INLINE_BYTES


def form(
    rank: int, peers: dict[int, socket.socket], size: int, deadline: Deadline
) -> tuple[segment.Mapping, Semaphores]:
    """The group's segment and its semaphores: made by rank 0, received by the others.

    Raises:
        PeerLostError, CollectiveTimeoutError: Rank 0 did not send it; or a rank is gone.
        DistributedError: There is not enough memory for it.
    """
    try:
        # rank 0 initializes the semaphores before any other rank has the descriptor
        fd = segment.create(size) if rank == 0 else _receive_segment(peers[0], size, deadline)
        try:
            memory = segment.Mapping(fd)
            semaphores = Semaphores(memory.flat.data_ptr(), rank, len(peers) + 1)
            if rank == 0:
                semaphores.create()
                for peer in peers.values():
                    socket.send_fds(peer, [b"segment"], [fd])
        finally:
            os.close(fd)
        return memory, semaphores
    except TimeoutError as error:
        raise CollectiveTimeoutError(
            f"rank 0 did not form the group within {deadline.seconds:g} s"
        ) from error
    except ConnectionError as error:
        raise PeerLostError("a rank died or gave up while the group was formed") from error


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
