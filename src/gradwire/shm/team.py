"""What the collectives stand on: headers that all ranks see, places for data, and waiting.

The group's segment, made by rank 0, holds the semaphores and, twice over, a header and a short
piece of data ("inline") for each rank. Twice, because a quick rank may begin the next collective
while a slow one still reads the last; it cannot begin the one after that. Long data lies in
regions: the caller's tensor, if it was allocated in one, or else the rank's staging region, some
slots through which it passes piece by piece.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from gradwire.errors import CollectiveTimeoutError, DistributedError, PeerLostError
from gradwire.shm import segment
from gradwire.shm.header import (
    NOWHERE,
    Call,
    Place,
    check_agreement,
    header_bytes,
    place_of,
    read,
    write,
)
from gradwire.shm.links import Kind, Links, Message, Receive
from gradwire.shm.regions import STAGING, Regions
from gradwire.shm.rings import RINGS, Ring, wanted
from gradwire.shm.sync import SEMAPHORE_BYTES, Deadline, Semaphores

__all__ = ["INLINE_BYTES", "Team"]

INLINE_BYTES = 32 << 10
"""Up to here data travels with the header: one wait instead of two or more."""


class Team:
    """One rank's part of a group.

    Args:
        rank: This rank.
        size: How many there are.
        peers: A connection to each other rank.
        other: As `receive` of `Links`, for messages that concern neither regions nor failure.
        on_lost: Called there when a peer is lost.
        deadline: For the group to form.

    Attributes:
        links: The connections.
        mark: A number that all ranks' next announcement has to carry.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        peers: dict[int, socket.socket],
        other: Receive,
        on_lost: Callable[[int, DistributedError], None],
        deadline: Deadline,
    ) -> None:
        self.rank, self.size = rank, size
        self._others = [peer for peer in range(size) if peer != rank]
        self._other = other
        self._regions = Regions()
        layout = _Layout(size)
        try:
            memory, self._semaphores = _form(rank, peers, layout.size, deadline)
            self._kind, self._deadline = "forming the group", deadline
            self.links = Links(peers, self._receive, on_lost)
        except BaseException:
            for peer in peers.values():
                peer.close()  # the others wait for this rank
            raise
        view, flat = memory.bytes, memory.flat
        self._headers = [
            [view[layout.header(parity, r) :][: layout.header_bytes] for r in range(size)]
            for parity in (0, 1)
        ]
        self._inline = [
            [flat[layout.inline(parity, r) :][:INLINE_BYTES] for r in range(size)]
            for parity in (0, 1)
        ]
        self._parity = self.mark = 0
        self._typed: dict[tuple[int, int, torch.dtype], Tensor] = {}
        self._staging: dict[int, Tensor] = {}
        self._ring: int | None = None

    def announce(
        self, call: Call, place: Place, deadline: Deadline, inline: Sequence[Tensor] = ()
    ) -> None:
        """Begin a collective: every rank tells what it calls and where its data lies.

        Args:
            call: What this rank calls.
            place: Where its data lies.
            deadline: For all waits of this collective.
            inline: Tensors of the call's dtype to put one after the other with the header.

        Raises:
            MismatchError: On all ranks, if the calls do not fit each other.
            PeerLostError, PeerFailedError, CollectiveTimeoutError: A rank does not take part.
        """
        self._kind, self._deadline = call.kind, deadline
        self._parity ^= 1
        self._ring = None
        self._regions.release_ended(self.links, deadline)
        start = 0
        for block in inline:
            self.inline(self.rank, call.dtype, start, block.numel()).copy_(block)
            start += block.numel()
        headers = self._headers[self._parity]
        mark, self.mark = self.mark, 0
        write(headers[self.rank], call, place, mark)
        self.sync()
        check_agreement(headers, self.rank)

    def places(self) -> list[Place]:
        """Where each rank's data lies, as announced."""
        return [place_of(header) for header in self._headers[self._parity]]

    def calls(self) -> list[Call]:
        """What each rank called, as announced."""
        return [read(header)[0] for header in self._headers[self._parity]]

    def sync(self) -> None:
        """Wait until every rank has come this far; all they wrote can then be read."""
        self.post()
        self.take()

    def post(self) -> None:
        """Tell all others that this rank has come this far."""
        self._semaphores.post(self._others)

    def take(self) -> None:
        """Wait for the first post of every other rank that was not yet taken."""
        self._semaphores.wait(self._others, self._look)

    def turns(self, pieces: int, *, stages: int) -> Iterator[list[int]]:
        """The turns of a pipeline in which pieces pass through `stages`, with posts between.

        In each turn a rank does every stage for one piece, that of the later stages being from
        before: the turn is the list of the pieces' numbers, -1 for none. It posts after each turn,
        but takes only what others posted `ring.lag(stages)` turns ago, and so waits for none that
        is behind by less. What others did in the stage before can be used, and a slot used again.
        """
        lag = self.ring.lag(stages)
        schedule = list(self.ring.schedule(pieces, stages))
        posts = len(schedule) - lag - 1
        for turn, numbers in enumerate(schedule):
            yield numbers
            if turn < posts:
                self.post()
            if 0 <= turn - lag < posts:
                self.take()

    def inline(self, rank: int, dtype: torch.dtype, start: int, count: int) -> Tensor:
        """Elements of what a rank put with its header."""
        key = (self._parity, rank, dtype)
        typed = self._typed.get(key)
        if typed is None:
            with torch.inference_mode(False):  # it is kept for operations outside
                typed = self._typed[key] = self._inline[self._parity][rank].view(dtype)
        return typed[start : start + count]

    def locate(self, tensor: Tensor) -> Place:
        """Where a tensor of this rank lies."""
        return self._regions.locate(tensor)

    def at(self, rank: int, place: Place, dtype: torch.dtype, start: int, count: int) -> Tensor:
        """Elements of a rank's tensor that lies in a region, counted from its place."""
        region = self._regions.of_peer(rank, place.region, self.links, self._deadline)
        first = place.offset + start * dtype.itemsize
        return region[first : first + count * dtype.itemsize].view(dtype)

    def nowhere(self, nbytes: int, *, sends: bool = True) -> Place:
        """The place of data that lies in no region; before `announce`.

        Args:
            nbytes: How much of it there is.
            sends: Whether it is this rank's to send, which takes memory for it to pass through.
        """
        number = wanted(nbytes)
        if sends:
            self._stage(number)
        return Place(NOWHERE, number)

    @property
    def ring(self) -> Ring:
        """What data in no region passes through: the longest that a rank's place asks for."""
        return RINGS[self._ring_number()]

    def _ring_number(self) -> int:
        if self._ring is None:
            self._ring = max(place.offset for place in self.places() if place.region < 0)
        return self._ring

    def _stage(self, number: int) -> Tensor:
        staging = self._staging.get(number)
        if staging is None:
            deadline = Deadline(self._deadline.seconds)
            size = RINGS[number].slots * RINGS[number].slot_bytes
            staging = self._regions.allocate(size, self.links, deadline, STAGING[number])
            self._staging[number] = staging
        return staging

    def slots(self, rank: int, dtype: torch.dtype) -> list[Tensor]:
        """The slots that a rank's data passes through."""
        number = self._ring_number()
        if rank == self.rank:
            region = self._stage(number)
        else:
            region = self._regions.of_peer(rank, STAGING[number], self.links, self._deadline)
        return list(region.view(dtype).chunk(RINGS[number].slots))

    def allocate(self, size: int) -> Tensor:
        """Bytes in a new region of this rank."""
        return self._regions.allocate(size, self.links, Deadline(self._deadline.seconds))

    def close(self) -> None:
        """Leave the group."""
        self.links.close()
        self._regions.close()
        for kept in (self._headers, self._inline, self._typed, self._staging):
            kept.clear()

    def _look(self, missing: Sequence[int]) -> None:
        # first who is lost, then who has posted: a peer may post its last and then go
        lost = [peer for peer in missing if peer in self.links.lost]
        absent = [peer for peer in missing if not self._semaphores.posted(peer)]
        if absent:
            self.links.check([peer for peer in lost if peer in absent])
        if absent and self._deadline.over():
            raise CollectiveTimeoutError(
                f"{self._kind}: rank {self.rank} waited {self._deadline.seconds:g} s in vain for "
                f"ranks {absent}: see what they do, or give the group a longer timeout"
            )

    def _receive(self, peer: int, message: Message) -> Callable[[], None] | None:
        if message.kind in (Kind.REGION, Kind.RELEASE):
            self._regions.receive(peer, message)
            return None
        return self._other(peer, message)


class _Layout:
    """Where things lie in the group's segment."""

    def __init__(self, size: int) -> None:
        self._ranks = size
        self.header_bytes = header_bytes(size)
        self._headers = SEMAPHORE_BYTES * size * size
        self._inlines = (self._headers + 2 * size * self.header_bytes + 4095) // 4096 * 4096
        self.size = self._inlines + 2 * size * INLINE_BYTES

    def header(self, parity: int, rank: int) -> int:
        return self._headers + (parity * self._ranks + rank) * self.header_bytes

    def inline(self, parity: int, rank: int) -> int:
        return self._inlines + (parity * self._ranks + rank) * INLINE_BYTES


def _form(
    rank: int, peers: dict[int, socket.socket], size: int, deadline: Deadline
) -> tuple[segment.Mapping, Semaphores]:
    """The group's segment and its semaphores: made by rank 0, received by the others.

    Raises:
        PeerLostError, CollectiveTimeoutError: Rank 0 did not send it; or a rank is gone.
        DistributedError: There is no room for it.
    """
    try:
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
