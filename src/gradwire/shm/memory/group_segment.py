"""Segment of a group: allocated by rank 0, received by the others over their connections.

It holds the semaphores, the ranks' cores and, for each rank, two headers with short data ("inline")
beside them. There are two because a fast rank may begin the next collective while a slow one still
reads the headers of the last. It cannot begin the one after that, which needs a post of the slow
rank.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire._processes import Deadline
from gradwire.errors import CollectiveTimeoutError, DistributedError, PeerLostError
from gradwire.shm.memory import segment
from gradwire.shm.memory.group_semaphores import PLACE_BYTES, Placement, Semaphores
from gradwire.shm.memory.header import TABLES_AT, header_bytes
from gradwire.shm.runtime.sync import SEMAPHORE_BYTES

_INLINE_BYTES, _LEAST = 512 << 10, 32 << 10
"""Inline bytes of all ranks together, and the minimum for one rank. Data beside the header takes
one wait instead of two or more: between two ranks an all_reduce of 64 KiB takes 33 us instead of
90, one of 256 KiB 85 to 110 instead of 125 to 190, and one of 512 KiB the same time."""


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
