"""One rank's state of a group: the headers and data that ranks share, and how they wait.

Short data lies in the group's segment, beside the headers. Longer data lies in regions: the
caller's tensor, if it was allocated in one. Else it is copied to the rank's upfront region before
the ranks meet, up to `UPFRONT_BYTES`, or passes piece by piece through the slots of its staging
region.
"""

from __future__ import annotations

import ctypes
import socket
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from gradwire.errors import CollectiveTimeoutError, DistributedError
from gradwire.shm.group_segment import INLINE_BYTES, form
from gradwire.shm.header import (
    INLINE,
    PRIVATE,
    Call,
    Location,
    check_consistent,
    compared,
    location_of,
    packed,
    read,
    write,
    write_mark,
)
from gradwire.shm.links import Kind, Links, Message, Receive
from gradwire.shm.message_ring import RING_BYTES, MessageRing
from gradwire.shm.regions import RING, STAGING, UPFRONT, Regions
from gradwire.shm.rendezvous import process_of
from gradwire.shm.rings import RINGS, Ring, ring_for
from gradwire.shm.sync import Deadline, spins_for

__all__ = ["UPFRONT_BYTES", "GroupState"]

UPFRONT_BYTES = 1 << 20
"""Up to here ordinary tensors are copied before the ranks meet, which saves a wait; above it is
better to copy in and out at the same time."""
_KEPT_VIEWS = 256


class GroupState:
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
        self.rank, self.size = rank, size
        self._others = [peer for peer in range(size) if peer != rank]
        self._other = other
        self._regions = Regions()
        try:
            self._spins = spins_for([process_of(connection) for connection in peers.values()])
            segment = form(rank, peers, self._spins, deadline)
            self._kind, self._deadline = "forming the group", deadline
            self.links = Links(peers, self._receive, on_lost)
        except BaseException:
            for peer in peers.values():
                peer.close()  # ends the other ranks' waits for this one
            raise
        self._semaphores, self._headers = segment.semaphores, segment.headers
        self._compared = [[compared(header) for header in half] for half in segment.headers]
        self._inline = segment.inline
        self._parity = self._mark = 0
        self._views: dict[tuple[int, torch.dtype, int], list[Tensor]] = {}
        self._staging: dict[int, Tensor] = {}
        self._upfront: list[Tensor] = []
        self._crowd = size if self._spins == 1 else 0
        self._ring: int | None = None

    def begin(self, mark: int, seconds: float) -> None:
        """Begin an operation, before its first `announce`.

        Args:
            mark: What the header of its first collective carries; see `GroupBase.marked`.
            seconds: For all waits of the operation, from now on.
        """
        self._mark, self._deadline = mark, Deadline(seconds)

    def announce(self, call: Call, location: Location, inline: Sequence[Tensor] = ()) -> None:
        """Begin a collective: write this rank's header, wait for all others, and compare.

        Args:
            call: What this rank calls.
            location: Where this rank's data lies.
            inline: Tensors of the call's dtype to put one after the other with the header.

        Raises:
            MismatchError: On all ranks, if the calls do not fit each other.
            PeerLostError, PeerFailedError, CollectiveTimeoutError: A rank does not take part.
        """
        self._next(call.kind)
        if inline:
            self._write_inline(call.dtype, inline)
        write(self._headers[self._parity][self.rank], call, location, self._mark)
        self._mark = 0
        self._meet(tables=bool(call.sends))

    def prepared(self, call: Call, shape: torch.Size) -> Callable[[Tensor], list[Tensor]]:
        """A function that announces a call with short data beside its header, again and again.

        Args:
            call: Without tables.
            shape: Of the data, which takes up to `INLINE_BYTES`.

        Returns:
            The function: it is given this rank's data, and returns all ranks'.
        """
        header, rank = packed(call, Location(INLINE)), self.rank
        nbytes = call.numel * call.dtype.itemsize
        with torch.inference_mode(False):  # kept for calls outside of it
            halves = [
                [block.view(call.dtype)[: call.numel].view(shape) for block in half]
                for half in self._inline
            ]
        own = [half[rank][: len(header)] for half in self._headers]
        data = [_memory_of(half[rank]) for half in halves]

        def announce(tensor: Tensor) -> list[Tensor]:
            self._next(call.kind)
            parity = self._parity
            # two thirds of the time that torch's `copy_` takes
            data[parity][:] = ctypes.string_at(tensor.data_ptr(), nbytes)
            buffer = own[parity]
            buffer[:] = header
            if self._mark:
                write_mark(buffer, self._mark)
                self._mark = 0
            self._meet(tables=False)
            return halves[parity]

        return announce

    def _next(self, kind: str) -> None:
        self._kind = kind
        self._parity ^= 1
        self._ring = None
        self._regions.release_ended(self.links, self._deadline)

    def _meet(self, *, tables: bool) -> None:
        self.sync()
        # less than 1 µs, and any mismatch is the same error on all ranks, before data moves
        parts = self._compared[self._parity]
        if tables or parts.count(parts[self.rank]) != self.size:
            check_consistent(self._headers[self._parity], self.rank, tables=tables)

    def _write_inline(self, dtype: torch.dtype, blocks: Sequence[Tensor]) -> None:
        if len(blocks) == 1:
            self.all_inline(dtype, blocks[0].numel())[self.rank].copy_(blocks[0])
            return
        start = 0
        for block in blocks:
            self.inline(self.rank, dtype, start, block.numel()).copy_(block)
            start += block.numel()

    def locations(self) -> list[Location]:
        """Where each rank's data lies, as announced."""
        return [location_of(header) for header in self._headers[self._parity]]

    def calls(self) -> list[Call]:
        """What each rank called, as announced."""
        return [read(header)[0] for header in self._headers[self._parity]]

    def sync(self, partners: Sequence[int] | None = None) -> None:
        """A barrier: what any rank wrote before it can be read by all ranks after it.

        Args:
            partners: The ranks that this one waits for, each of which waits for this one; all
                others if None. Where few ranks need each other, the rest need no core for it.
        """
        semaphores = self._semaphores
        peers = self._others if partners is None else partners
        semaphores.post(peers)
        semaphores.wait(peers, self._check_peers)

    def take_waits(self) -> dict[int, int] | None:
        """For how many ns this rank has waited for each other, since the last call; or None."""
        taken = self._semaphores.waited
        if not taken:
            return None
        self._semaphores.waited = {}
        return taken

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

    def inline(self, rank: int, dtype: torch.dtype, start: int, count: int) -> Tensor:
        """Elements of the data that a rank wrote beside its header."""
        return self.all_inline(dtype, INLINE_BYTES // dtype.itemsize)[rank][start : start + count]

    def all_inline(self, dtype: torch.dtype, count: int) -> list[Tensor]:
        """The first elements of the data that each rank wrote beside its header."""
        key = (self._parity, dtype, count)
        views = self._views.get(key)
        if views is None:
            if len(self._views) == _KEPT_VIEWS:
                self._views.clear()
            # kept for later operations, which may run outside of inference mode; making them anew
            # costs each time as much as adding a thousand numbers
            with torch.inference_mode(False):
                views = [block.view(dtype)[:count] for block in self._inline[self._parity]]
            self._views[key] = views
        return views

    def locate(self, tensor: Tensor) -> Location:
        """The location of a tensor of this rank."""
        return self._regions.locate(tensor)

    def at(
        self, rank: int, location: Location, dtype: torch.dtype, start: int, count: int
    ) -> Tensor:
        """Elements `start` to `start + count` of a rank's tensor that lies in a region."""
        region = self._regions.of_peer(rank, location.region, self.links, self._deadline)
        first = location.offset + start * dtype.itemsize
        return region[first : first + count * dtype.itemsize].view(dtype)

    def staged_location(self, nbytes: int, *, sends: bool = True) -> Location:
        """The location of data in private memory: the ring that this rank asks for.

        Called before `announce`.

        Args:
            nbytes: Bytes of the data.
            sends: Whether this rank writes it to slots, and so needs a staging region.
        """
        number = ring_for(nbytes, crowd=self._crowd)
        if sends:
            self._stage(number)
        return Location(PRIVATE, number)

    def upfront(self, dtype: torch.dtype) -> tuple[Location, Tensor]:
        """Where data of up to `UPFRONT_BYTES` goes before `announce`, and that memory.

        There are two halves, for even and odd collectives: peers may still read what was there for
        the last one, and are done with that of the one before it.
        """
        if not self._upfront:
            deadline, size = Deadline(self._deadline.seconds), 2 * UPFRONT_BYTES
            region = self._regions.allocate(size, self.links, deadline, UPFRONT)
            self._upfront = list(region.chunk(2))
        parity = self._parity ^ 1
        return Location(UPFRONT, UPFRONT_BYTES * parity), self._upfront[parity].view(dtype)

    def own_upfront(self, dtype: torch.dtype) -> Tensor:
        """What `upfront` gave before the last `announce`."""
        return self._upfront[self._parity].view(dtype)

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
        memory = self._regions.allocate(RING_BYTES, self.links, deadline, RING + receiver)
        return MessageRing(memory, self._spins, create=True)

    def find_ring(self, sender: int) -> MessageRing:
        """The ring for a peer's messages to this rank, which the peer has made."""
        memory = self._regions.found(sender, RING + self.rank)
        if memory.numel() != RING_BYTES:
            raise DistributedError(f"rank {sender} sent a ring of {memory.numel()} bytes")
        return MessageRing(memory, self._spins, create=False)

    def close(self) -> None:
        """Leave the group."""
        self.links.close()
        self._regions.close()
        for kept in (
            self._headers,
            self._compared,
            self._inline,
            self._views,
            self._staging,
            self._upfront,
        ):
            kept.clear()

    def _check_peers(self, missing: Sequence[int]) -> None:
        # lost peers are read before the semaphores: a peer may post and then leave in order, and
        # its post must count
        lost = [peer for peer in missing if peer in self.links.lost]
        absent = [peer for peer in missing if not self._semaphores.posted(peer)]
        if absent:
            self.links.check([peer for peer in lost if peer in absent])
        if absent and self._deadline.over():
            raise CollectiveTimeoutError(
                f"{self._kind}: rank {self.rank} waited {self._deadline.seconds:g} s for ranks "
                f"{absent}: see what they do, or give the group a longer timeout"
            )

    def _receive(self, peer: int, message: Message) -> Callable[[], None] | None:
        if message.kind in (Kind.REGION, Kind.RELEASE):
            self._regions.receive(peer, message)
            return None
        return self._other(peer, message)


def _memory_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor, for as long as that lives."""
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")
