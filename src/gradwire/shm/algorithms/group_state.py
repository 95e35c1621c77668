"""State of a group on one rank: locations of longer data, and the pipeline that moves it in pieces.

Short data is in the group's segment, beside the headers. Longer data is in regions: in the caller's
tensor, if that was allocated in one. Otherwise it is copied to the rank's upfront region before the
ranks meet, up to some size, or passes piece by piece through the slots of its staging region.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from gradwire._processes import Deadline
from gradwire.errors import DistributedError
from gradwire.shm.meeting.links import Kind, Message, Receive
from gradwire.shm.meeting.meeting import Meeting
from gradwire.shm.meeting.regions import (
    MESSAGE_RING,
    RINGS,
    STAGING,
    UPFRONT,
    Regions,
    Ring,
    ring_for,
)
from gradwire.shm.memory.header import PRIVATE, Location
from gradwire.shm.messages.message_ring import RING_BYTES, MessageRing
from gradwire.shm.runtime.sync import spins_beside

UPFRONT_BYTES = (1 << 20, 8 << 20, 32 << 20)
"""Sizes of upfront regions. Ordinary tensors up to the first size are copied before the ranks meet,
which saves a wait. Above it, copying in and out at the same time is faster, if there are enough
cores."""


class GroupState(Meeting):
    """State of a group on one rank.

    Args:
        peers: Connection to each other rank.
        other: Handler of messages that do not concern regions; see `receive` of `Links`.
        on_lost: Handler of lost peers; see `Links`.

    Attributes:
        links: Connections to the peers.
        is_awaited: Function that returns True while the main thread only waits for the running
            operation.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        peers: dict[int, socket.socket],
        other: Receive,
        on_lost: Callable[[int], Callable[[], None] | None],
        deadline: Deadline,
    ) -> None:
        self._other = other
        super().__init__(rank, size, peers, self._receive, on_lost, deadline)
        self._regions = Regions(self.links)
        self._staging: dict[int, Tensor] = {}
        self._upfront: dict[int, tuple[Tensor, ...]] = {}  # the halves, by region
        self._crowded = self._spins == 1
        self._ring: int | None = None
        self.is_awaited: Callable[[], bool] = lambda: False

    def _forget_last(self) -> None:
        self._ring = None
        self._regions.release_ended(self._deadline.seconds)

    def pipeline(
        self, pieces: int, *, stages: int, partners: Sequence[int] | None = None
    ) -> Iterator[list[int]]:
        """Yield the steps of a pipeline, in each of which every stage works on another piece.

        A rank posts after each step, and waits only for the posts of `ring.lag(stages)` steps ago:
        a rank may be that many steps ahead. After the wait, data that the other ranks wrote in the
        previous stage can be read, and slots that they have read can be written again.

        Args:
            pieces: Number of pieces.
            stages: Number of steps per piece.
            partners: Ranks to wait for; see `sync`.

        Yields:
            Number of the piece in each stage; -1 if the stage has none in this step.
        """
        lag = self.ring.lag(stages)
        peers = self._others if partners is None else partners
        schedule = list(self.ring.schedule(pieces, stages))
        posts = len(schedule) - lag - 1
        for step, numbers in enumerate(schedule):
            yield numbers
            if step < posts:
                self._semaphores.post(peers)
            if 0 <= step - lag < posts:
                self._semaphores.wait(peers, self._check_peers)

    def locate(self, tensor: Tensor) -> Location:
        """Return the location of a tensor of this rank."""
        return self._regions.locate(tensor)

    def at(
        self, rank: int, location: Location, dtype: torch.dtype, start: int, count: int
    ) -> Tensor:
        """Return elements `start` to `start + count` of a rank's tensor in a region."""
        first = Location(location.region, location.offset + start * dtype.itemsize)
        return self._regions.view(rank, first, dtype, count, self._deadline)

    def staged_location(
        self, nbytes: int, *, sends: bool = True, reduces: bool = False
    ) -> Location:
        """Return the location of data in private memory: the ring that this rank requests.

        Call it before `announce`.

        Args:
            nbytes: Bytes of the data.
            sends: True if this rank writes the data to slots, and so needs a staging region.
            reduces: True if all ranks reduce; see `ring_for`.
        """
        in_main = threading.current_thread() is threading.main_thread()
        beside_others = not (in_main or self.is_awaited())
        number = ring_for(
            nbytes,
            ranks=self.size,
            crowded=self._crowded,
            beside_others=beside_others,
            reduces=reduces,
        )
        if sends:
            self._stage(number)
        return Location(PRIVATE, number)

    def upfront_limit(self, *, alone: bool) -> int:
        """Return the maximum number of bytes that an exchange copies before the ranks meet.

        Args:
            alone: True if only one rank needs memory for it, now and in later calls.
        """
        if not self._crowded:
            return UPFRONT_BYTES[0]
        return UPFRONT_BYTES[-1] if alone else UPFRONT_BYTES[1]

    def upfront(self, dtype: torch.dtype, nbytes: int) -> tuple[Location, Tensor]:
        """Return location and memory for data that is copied before `announce`.

        There are two halves, for even and odd collectives: peers may still read the data of the
        last collective, but have finished with that of the one before it.
        """
        number, half = next(
            (number, half)
            for number, half in zip(UPFRONT, UPFRONT_BYTES, strict=True)
            if nbytes <= half
        )
        if number not in self._upfront:
            region = self.allocate(2 * half, number)
            self._upfront[number] = region.chunk(2)
        parity = self._parity ^ 1
        return Location(number, half * parity), self._upfront[number][parity].view(dtype)

    def own_upfront(self, dtype: torch.dtype, location: Location) -> Tensor:
        """Return the memory that `upfront` returned with this location; after `announce`."""
        return self._upfront[location.region][self._parity].view(dtype)

    @property
    def ring(self) -> Ring:
        """Ring for data in private memory: the largest that any rank requests."""
        return RINGS[self._ring_number()]

    def _ring_number(self) -> int:
        if self._ring is None:
            self._ring = max(
                location.offset for location in self.locations() if location.region < 0
            )
        return self._ring

    def _stage(self, number: int) -> Tensor:
        staging = self._staging.get(number)
        if staging is None:
            size = RINGS[number].slots * RINGS[number].slot_bytes
            staging = self.allocate(size, STAGING[number])
            self._staging[number] = staging
        return staging

    def slots(self, rank: int, dtype: torch.dtype) -> list[Tensor]:
        """Return the slots through which a rank's data passes."""
        number = self._ring_number()
        if rank == self.rank:
            region = self._stage(number)
        else:
            region = self._regions.of_peer(rank, STAGING[number], self._deadline)
        return list(region.view(dtype).chunk(RINGS[number].slots))

    def allocate(self, size: int, number: int | None = None) -> Tensor:
        """Allocate bytes in a new region of this rank, of this number if one is given."""
        return self._regions.allocate(size, Deadline(self._deadline.seconds), number)

    def make_ring(self, receiver: int) -> MessageRing:
        """Make the ring for this rank's messages to another."""
        memory = self.allocate(RING_BYTES, MESSAGE_RING + receiver)
        return self._map_ring(memory, receiver, create=True)

    def find_ring(self, sender: int) -> MessageRing:
        """Map the ring that a peer made for its messages to this rank."""
        memory = self._regions.found(sender, MESSAGE_RING + self.rank)
        if memory.numel() != RING_BYTES:
            raise DistributedError(f"rank {sender} sent a ring of {memory.numel()} bytes")
        return self._map_ring(memory, sender, create=False)

    def _map_ring(self, memory: Tensor, peer: int, *, create: bool) -> MessageRing:
        # If ranks share cores, waits for messages do not yield: other pairs would take the cores,
        # and long messages take up to a third longer.
        spins, yields = self._spins, None
        if self._crowded:
            spins, yields = spins_beside(self._processes[peer]), 0
        is_beside = partial(self._placement.is_beside, peer)
        return MessageRing(memory, spins, yields, is_beside, create=create)

    def close(self) -> None:
        """Leave the group."""
        super().close()
        self._regions.close()
        self._staging.clear()
        self._upfront.clear()

    def _receive(self, peer: int, message: Message) -> Callable[[], None] | None:
        if message.kind in (Kind.REGION, Kind.RELEASE):
            self._regions.receive(peer, message)
            return None
        return self._other(peer, message)
