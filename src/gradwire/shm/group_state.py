"""One rank's state of a group: where its longer data lies, and how that is passed in pieces.

Short data lies in the group's segment, beside the headers. Longer data lies in regions: the
caller's tensor, if it was allocated in one. Else it is copied to the rank's upfront region before
the ranks meet, up to some size, or passes piece by piece through the slots of its staging
region.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from gradwire.errors import DistributedError
from gradwire.shm.header import PRIVATE, Location
from gradwire.shm.links import Kind, Message, Receive
from gradwire.shm.meeting import Meeting
from gradwire.shm.message_ring import RING_BYTES, MessageRing
from gradwire.shm.regions import MESSAGE_RING, RINGS, STAGING, UPFRONT, Regions, Ring, ring_for
from gradwire.shm.sync import Deadline, spins_beside

UPFRONT_BYTES = (1 << 20, 8 << 20, 32 << 20)
"""What upfront regions hold. Up to the first ordinary tensors are copied before the ranks meet,
which saves a wait; above it is better to copy in and out at the same time, where ranks have cores
enough for that."""


class GroupState(Meeting):
    """One rank's part of a group.

    Args:
        rank: This rank.
        size: How many there are.
        peers: A connection to each other rank.
        other: As `receive` of `Links`, for the messages that are not about regions.
        on_lost: As of `Links`.
        deadline: For the group to form.

    Attributes:
        links: The connections.
        is_awaited: Whether the main thread does nothing but wait for the operation of this one.
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
        self._regions = Regions()
        super().__init__(rank, size, peers, self._receive, on_lost, deadline)
        self._staging: dict[int, Tensor] = {}
        self._upfront: dict[int, tuple[Tensor, ...]] = {}  # the halves, by region
        self._crowded = self._spins == 1
        self._ring: int | None = None
        self.is_awaited: Callable[[], bool] = lambda: False

    def _forget_last(self) -> None:
        self._ring = None
        self._regions.release_ended(self.links, self._deadline.seconds)

    def pipeline(
        self, pieces: int, *, stages: int, partners: Sequence[int] | None = None
    ) -> Iterator[list[int]]:
        """The steps of a pipeline: in each, every stage works on another piece.

        A rank posts after each step, and waits only for the posts of `ring.lag(stages)` steps ago:
        a rank may be that many steps ahead. After the wait, what the other ranks wrote in the
        previous stage can be read, and a slot that they have read can be written again.

        Args:
            pieces: How many there are.
            stages: How many steps one piece takes.
            partners: As of `sync`.

        Yields:
            The number of the piece in each stage; -1 where a stage has none in this step.
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
        """The location of a tensor of this rank."""
        return self._regions.locate(tensor)

    def at(
        self, rank: int, location: Location, dtype: torch.dtype, start: int, count: int
    ) -> Tensor:
        """Elements `start` to `start + count` of a rank's tensor that lies in a region."""
        first = Location(location.region, location.offset + start * dtype.itemsize)
        return self._regions.view(rank, first, dtype, count, self.links, self._deadline)

    def staged_location(
        self, nbytes: int, *, sends: bool = True, reduces: bool = False
    ) -> Location:
        """The location of data in private memory: the ring that this rank asks for.

        Called before `announce`.

        Args:
            nbytes: Bytes of the data.
            sends: Whether this rank writes it to slots, and so needs a staging region.
            reduces: As of `ring_for`.
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
        """Up to how many bytes an exchange copies before the ranks meet.

        Args:
            alone: Whether one rank alone takes memory for it, now and in calls to come.
        """
        if not self._crowded:
            return UPFRONT_BYTES[0]
        return UPFRONT_BYTES[-1] if alone else UPFRONT_BYTES[1]

    def upfront(self, dtype: torch.dtype, nbytes: int) -> tuple[Location, Tensor]:
        """Where data goes before `announce`, and that memory.

        There are two halves, for even and odd collectives: peers may still read what was there for
        the last one, and are done with that of the one before it.
        """
        number, half = next(
            (number, half)
            for number, half in zip(UPFRONT, UPFRONT_BYTES, strict=True)
            if nbytes <= half
        )
        if number not in self._upfront:
            deadline = Deadline(self._deadline.seconds)
            region = self._regions.allocate(2 * half, self.links, deadline, number)
            self._upfront[number] = region.chunk(2)
        parity = self._parity ^ 1
        return Location(number, half * parity), self._upfront[number][parity].view(dtype)

    def own_upfront(self, dtype: torch.dtype, location: Location) -> Tensor:
        """The memory that `upfront` gave with this location, after `announce`."""
        return self._upfront[location.region][self._parity].view(dtype)

    @property
    def ring(self) -> Ring:
        """The ring for data in private memory: the largest that any rank asks for."""
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

    def make_ring(self, receiver: int) -> MessageRing:
        """The ring for this rank's messages to another."""
        deadline = Deadline(self._deadline.seconds)
        memory = self._regions.allocate(RING_BYTES, self.links, deadline, MESSAGE_RING + receiver)
        return self._map_ring(memory, receiver, create=True)

    def find_ring(self, sender: int) -> MessageRing:
        """The ring for a peer's messages to this rank, which the peer has made."""
        memory = self._regions.found(sender, MESSAGE_RING + self.rank)
        if memory.numel() != RING_BYTES:
            raise DistributedError(f"rank {sender} sent a ring of {memory.numel()} bytes")
        return self._map_ring(memory, sender, create=False)

    def _map_ring(self, memory: Tensor, peer: int, *, create: bool) -> MessageRing:
        # Where ranks share cores, waits for messages do not yield: the cores are other pairs', and
        # long messages take up to a third longer.
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
