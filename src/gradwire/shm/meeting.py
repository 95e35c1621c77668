"""State of a group on one rank: barriers with the exchange of headers, and locations of data.

Every collective begins with `announce`, in which all ranks wait for each other. Later steps of a
collective may wait for fewer ranks.

Short data is in the group's segment, beside the headers. Longer data is in regions: in the caller's
tensor, if that was allocated in one. Otherwise it is copied to the rank's upfront region before the
ranks meet, up to some size, or passes piece by piece through the slots of its staging region.
"""

from __future__ import annotations

import ctypes
import socket
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial

import torch
from torch import Tensor

from gradwire._processes import Deadline
from gradwire.errors import CollectiveTimeoutError, DistributedError, MismatchError
from gradwire.shm.header import (
    COMPARED_BYTES,
    INLINE,
    PRIVATE,
    Call,
    Location,
    check_consistent,
    location_of,
    packed,
    write_mark,
)
from gradwire.shm.links import Kind, Links, Message, Receive
from gradwire.shm.message_ring import RING_BYTES, MessageRing
from gradwire.shm.regions import MESSAGE_RING, RINGS, STAGING, UPFRONT, Regions, Ring, ring_for
from gradwire.shm.rendezvous import process_of
from gradwire.shm.semaphores import GroupSegment, spins_beside, spins_for

_KEPT_VIEWS = 256


UPFRONT_BYTES = (1 << 20, 8 << 20, 32 << 20)
"""Sizes of upfront regions. Ordinary tensors up to the first size are copied before the ranks meet,
which saves a wait. Above it, copying in and out at the same time is faster, if there are enough
cores."""


@cache
def _memmove() -> Callable[[int, int, int], None]:
    """Return the C library's memmove, called with the GIL, which could take 5 ms to reacquire."""
    function = ctypes.PyDLL(None).memmove
    function.argtypes, function.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t), None
    return function


class GroupState:
    """State of a group on one rank: where data is, and the pipeline that moves it in pieces."""

    def __init__(
        self,
        rank: int,
        size: int,
        peers: dict[int, socket.socket],
        deadline: Deadline,
    ) -> None:
        self.rank, self.size = rank, size
        self._others = [peer for peer in range(size) if peer != rank]
        try:
            self._processes = {peer: process_of(peers[peer])[0] for peer in self._others}
            self._spins = spins_for(self._processes.values())
            segment = GroupSegment(rank, peers, self._spins, deadline)
            self._kind, self._deadline = "forming the group", deadline
            self.links = Links(peers)
        except BaseException:
            for peer in peers.values():
                peer.close()  # end the other ranks' waits for this one
            raise
        self._semaphores, self._headers = segment.semaphores, segment.headers
        self._placement, self._tables = segment.placement, segment.tables
        self._compared = [[header[:COMPARED_BYTES] for header in half] for half in segment.headers]
        self._semaphores.poll = self._check_peers
        self._inline = segment.inline
        # maximum size of data beside the header
        self.inline_bytes = segment.inline[0][0].numel()
        self._parity = self._mark = 0
        # last mismatch of this group; a weak reference, as its traceback keeps the callers' frames
        self._mismatch: weakref.ref[MismatchError] | None = None
        # headers that `short_exchange` wrote for this rank in even and odd collectives
        self._shown: list[bytes | None] = [None, None]
        self._views: dict[tuple[int, torch.dtype, int], list[Tensor]] = {}
        self.links.receive = self._receive
        self.report_failure = self.links.report_failure
        self.close_in_child = self.links.close_in_child
        # handler of messages that do not concern regions; see `receive` of `Links`
        self.other: Receive = lambda peer, message: None
        self._regions = Regions(self.links)
        self.locate = self._regions.locate
        self._staging: dict[int, Tensor] = {}
        self._upfront: dict[int, tuple[Tensor, ...]] = {}  # the halves, by region
        self._crowded = self._spins == 1
        self._ring: int | None = None
        # returns True while the main thread only waits for the running operation
        self.is_awaited: Callable[[], bool] = lambda: False
        # called every 50 ms of a wait, and raises to end it
        self.on_wait: Callable[[], None] = lambda: None

    def begin(self, mark: int, seconds: float) -> None:
        """Begin an operation, before its first `announce`."""
        self._mark, self._deadline = mark, Deadline(seconds)

    def announce(self, call: Call, location: Location, inline: Sequence[Tensor] = ()) -> None:
        """Begin a collective: write this rank's header, wait for all others, and compare."""
        self._next(call.kind)
        if len(inline) == 1:
            self.all_inline(call.dtype, inline[0].numel())[self.rank].copy_(inline[0])
        elif inline:
            start = 0
            for block in inline:
                if count := block.numel():  # in a gather most are empty
                    self.inline(self.rank, call.dtype, start, count).copy_(block)
                    start += count
        self._shown[self._parity] = None
        header = packed(call, location, self._mark)
        self._headers[self._parity][self.rank][: len(header)] = header
        self._mark = 0
        self.sync()
        tables = bool(call.sends)
        # takes less than 1 µs, and turns any mismatch into the same error on all ranks
        parts = self._compared[self._parity]
        fit = parts.count(parts[self.rank]) == self.size
        if not fit or (tables and not torch.equal(*self._tables[self._parity])):
            self._check_consistent(tables=tables)

    def short_exchange(self, call: Call, shape: torch.Size) -> Callable[[Tensor], list[Tensor]]:
        """Return a function that runs `announce` with short data, for a call that is repeated."""
        header, rank = packed(call, Location(INLINE)), self.rank
        nbytes = call.numel * call.dtype.itemsize
        with torch.inference_mode(False):  # kept for calls outside of it
            halves = [
                [block.view(call.dtype)[: call.numel].view(shape) for block in half]
                for half in self._inline
            ]
        own = [half[rank][: len(header)] for half in self._headers]
        data, move = [half[rank].data_ptr() for half in halves], _memmove()
        post, wait, shown = self._semaphores.post, self._semaphores.wait, self._shown
        parts, size, others = self._compared, self.size, self._others

        def exchange(tensor: Tensor) -> list[Tensor]:
            self._next(call.kind)
            parity = self._parity
            # memmove takes two thirds of the time of torch's `copy_` for short data
            move(data[parity], tensor.data_ptr(), nbytes)
            if shown[parity] is not header or self._mark:
                # an unchanged header is not written: it stays in the readers' caches
                buffer, shown[parity] = own[parity], None
                buffer[:] = header
                if self._mark:
                    write_mark(buffer, self._mark)
                    self._mark = 0
                else:
                    shown[parity] = header
            post(others)
            wait(others)
            if parts[parity].count(parts[parity][rank]) != size:
                self._check_consistent(tables=False)
            return halves[parity]

        return exchange

    def _next(self, kind: str) -> None:
        self._kind = kind
        self._parity ^= 1
        self._ring = None
        # all ranks have ended the collective before the last
        self._regions.release_ended(self._deadline.seconds)

    def _check_consistent(self, *, tables: bool) -> None:
        try:
            check_consistent(self._headers[self._parity], self.rank, tables=tables)
        except MismatchError as error:
            self._mismatch = weakref.ref(error)
            raise

    def is_agreed(self, error: MismatchError) -> bool:
        """Return True if all ranks raise this error; False if a signal handler raised it here."""
        return self._mismatch is not None and error is self._mismatch()

    def locations(self) -> list[Location]:
        """Return the announced location of each rank's data."""
        return [location_of(header) for header in self._headers[self._parity]]

    def sends(self) -> list[list[int]]:
        """Return the announced number of elements from each rank for each, in calls with tables."""
        sent, _ = self._tables[self._parity]
        table: list[list[int]] = sent.tolist()
        return table

    def sync(self, partners: Sequence[int] | None = None) -> None:
        """Run a barrier: all ranks can then read what any rank wrote before it."""
        # partners wait for each other alone: the other ranks need no core for the barrier
        peers = self._others if partners is None else partners
        self._semaphores.post(peers)
        self._semaphores.wait(peers)

    def take_waits(self) -> dict[int, int] | None:
        """Return the ns that this rank waited for each other since the last call, or None."""
        taken = self._semaphores.waited
        if not taken:
            return None
        self._semaphores.waited = {}
        return taken

    def inline(self, rank: int, dtype: torch.dtype, start: int, count: int) -> Tensor:
        """Return elements of the data that a rank wrote beside its header."""
        if start == 0:  # kept, unlike a slice
            return self.all_inline(dtype, count)[rank]
        everything = self.all_inline(dtype, self.inline_bytes // dtype.itemsize)[rank]
        return everything[start : start + count]

    def all_inline(self, dtype: torch.dtype, count: int) -> list[Tensor]:
        """Return the first elements of the data that each rank wrote beside its header."""
        key = (self._parity, dtype, count)
        views = self._views.get(key)
        if views is None:
            if len(self._views) == _KEPT_VIEWS:
                self._views.clear()
            # kept for later operations, which may run outside inference mode; making a view costs
            # as much as adding a thousand numbers
            with torch.inference_mode(False):
                views = [block.view(dtype)[:count] for block in self._inline[self._parity]]
            self._views[key] = views
        return views

    def abort(self, error: DistributedError) -> None:
        """Make all waits of this rank fail; the first error counts."""
        self.links.aborted = self.links.aborted or error

    def close(self) -> None:
        """Leave the group."""
        self.links.close()
        for views in (self._headers, self._compared, self._tables, self._inline, self._views):
            views.clear()
        self._placement.close()
        self._regions.close()
        self._staging.clear()
        self._upfront.clear()

    def _check_peers(self, missing: Sequence[int]) -> None:
        self.on_wait()
        # read lost peers before the semaphores: a peer may post and then leave, and its post must
        # count
        lost = [peer for peer in missing if peer in self.links.lost]
        absent = [peer for peer in missing if not self._semaphores.posted(peer)]
        if absent:
            self.links.check([peer for peer in lost if peer in absent])
        if absent and self._deadline.over():
            ranks = self.links.ranks
            raise CollectiveTimeoutError(
                f"{self._kind}: rank {ranks[self.rank]} waited {self._deadline.seconds:g} s for "
                f"ranks {[ranks[peer] for peer in absent]}: check what these ranks are doing, or "
                "give the group a longer timeout"
            )

    # --- longer data, in regions and staging slots ---

    def pipeline(
        self, pieces: int, *, stages: int, partners: Sequence[int] | None = None
    ) -> Iterator[list[int]]:
        """Yield the steps of a pipeline: the number of the piece in each stage, -1 for none."""
        # A rank posts after each step, and waits only for the posts of `lag` steps ago: a rank may
        # be that many steps ahead. After the wait, data that the other ranks wrote in the previous
        # stage can be read, and slots that they have read can be written again.
        lag = self.ring.lag(stages)
        peers = self._others if partners is None else partners
        schedule = list(self.ring.schedule(pieces, stages))
        posts = len(schedule) - lag - 1
        for step, numbers in enumerate(schedule):
            yield numbers
            if step < posts:
                self._semaphores.post(peers)
            if 0 <= step - lag < posts:
                self._semaphores.wait(peers)

    def at(
        self, rank: int, location: Location, dtype: torch.dtype, start: int, count: int
    ) -> Tensor:
        """Return elements `start` to `start + count` of a rank's tensor in a region."""
        first = Location(location.region, location.offset + start * dtype.itemsize)
        return self._regions.view(rank, first, dtype, count, self._deadline)

    def staged_location(
        self, nbytes: int, *, sends: bool = True, reduces: bool = False
    ) -> Location:
        """Return the ring that this rank requests for private data; call it before `announce`."""
        in_main = threading.current_thread() is threading.main_thread()
        beside_others = not (in_main or self.is_awaited())
        number = ring_for(nbytes, self.size, self._crowded, beside_others, reduces)
        # this rank writes the data to slots, and so needs a staging region
        if sends:
            self._stage(number)
        return Location(PRIVATE, number)

    def upfront_limit(self, *, alone: bool) -> int:
        """Return the maximum number of bytes that an exchange copies before the ranks meet."""
        if not self._crowded:
            return UPFRONT_BYTES[0]
        return UPFRONT_BYTES[-1] if alone else UPFRONT_BYTES[1]

    def upfront(self, dtype: torch.dtype, nbytes: int) -> tuple[Location, Tensor]:
        """Return location and memory for data that is copied before `announce`."""
        # There are two halves, for even and odd collectives: peers may still read the data of the
        # last collective, but have finished with that of the one before it.
        sizes = zip(UPFRONT, UPFRONT_BYTES, strict=True)
        number, half = next(pair for pair in sizes if nbytes <= pair[1])
        if number not in self._upfront:
            region = self.allocate(2 * half, number)
            self._upfront[number] = region.chunk(2)
        parity = self._parity ^ 1
        return Location(number, half * parity), self._upfront[number][parity].view(dtype)

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
            region, _ = self._regions.of_peer(rank, STAGING[number], self._deadline)
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
        memory, _ = self._regions.of_peer(sender, MESSAGE_RING + self.rank, Deadline(0))
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

    def _receive(self, peer: int, message: Message) -> Callable[[], None] | None:
        if message.kind in (Kind.REGION, Kind.RELEASE):
            self._regions.receive(peer, message)
            return None
        return self.other(peer, message)
