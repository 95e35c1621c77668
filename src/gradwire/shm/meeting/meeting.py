"""Barriers of a group with the exchange of headers, and of short data beside them.

Every collective begins with `announce`, in which all ranks wait for each other. Later steps of a
collective may wait for fewer ranks.
"""

from __future__ import annotations

import ctypes
import socket
import weakref
from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

from gradwire._processes import Deadline
from gradwire.errors import CollectiveTimeoutError, DistributedError, MismatchError
from gradwire.shm.meeting.links import Links, Receive
from gradwire.shm.meeting.rendezvous import process_of
from gradwire.shm.memory.group_segment import form
from gradwire.shm.memory.header import (
    INLINE,
    LOCATION_BYTES,
    UNEVEN,
    Call,
    Location,
    check_consistent,
    compared,
    located,
    location_of,
    packed,
    read,
    write,
    write_location,
    write_mark,
)
from gradwire.shm.runtime.sync import spins_for

_KEPT_VIEWS = 256


class Meeting:
    """State of a group on one rank, without the regions for longer data.

    Args:
        peers: Connection to each other rank.
        receive, on_lost: Handlers, see `Links`.

    Attributes:
        links: Connections to the peers.
        inline_bytes: Maximum size of data beside the header.
        alike: True if the headers of all ranks were equal in the last call that `announce` began;
            only marks and, in gather and scatter, sizes may differ.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        peers: dict[int, socket.socket],
        receive: Receive,
        on_lost: Callable[[int], Callable[[], None] | None],
        deadline: Deadline,
    ) -> None:
        self.rank, self.size = rank, size
        self._others = [peer for peer in range(size) if peer != rank]
        try:
            self._processes = {peer: process_of(peers[peer]) for peer in self._others}
            self._spins = spins_for(self._processes.values())
            segment = form(rank, peers, self._spins, deadline)
            self._kind, self._deadline = "forming the group", deadline
            self.links = Links(peers, receive, on_lost)
        except BaseException:
            for peer in peers.values():
                peer.close()  # end the other ranks' waits for this one
            raise
        self._semaphores, self._headers = segment.semaphores, segment.headers
        self._placement = segment.placement
        self._compared = [[compared(header) for header in half] for half in segment.headers]
        self._located = [[located(header) for header in half] for half in segment.headers]
        self._tables = segment.tables
        self._post_all, self._wait_for_all = self._semaphores.barrier(
            self._others, self._check_peers
        )
        self._inline = segment.inline
        self.inline_bytes = segment.inline[0][0].numel()
        self._parity = self._mark = 0
        # last mismatch of this group; a weak reference, as its traceback keeps the callers' frames
        self._mismatch: weakref.ref[MismatchError] | None = None
        self.alike = True
        # headers that `short_exchange` wrote for this rank in even and odd collectives
        self._shown: list[bytes | None] = [None, None]
        self._views: dict[tuple[int, torch.dtype, int], list[Tensor]] = {}

    def begin(self, mark: int, seconds: float) -> None:
        """Begin an operation, before its first `announce`.

        Args:
            mark: Mark in the header of its first collective; see `Group.marked`.
            seconds: Time limit for all waits of the operation together.
        """
        self._mark, self._deadline = mark, Deadline(seconds)

    def announce(self, call: Call, location: Location, inline: Sequence[Tensor] = ()) -> None:
        """Begin a collective: write this rank's header, wait for all others, and compare.

        Args:
            call: Call of this rank.
            location: Location of this rank's data.
            inline: Tensors of the call's dtype to write one after the other beside the header.

        Raises:
            MismatchError: The calls of the ranks do not match; raised on all ranks.
            PeerLostError, PeerFailedError, CollectiveTimeoutError: A rank does not take part.
        """
        self._next(call.kind)
        if inline:
            self._write_inline(call.dtype, inline)
        self._shown[self._parity] = None
        write(self._headers[self._parity][self.rank], call, location, self._mark)
        self._mark = 0
        # only the root of a gather or scatter has tables, marked by UNEVEN: compared separately
        self._meet(tables=bool(call.sends) and (call.numel != UNEVEN or self.size == 1))

    def short_exchange(self, call: Call, shape: torch.Size) -> Callable[[Tensor], list[Tensor]]:
        """Return a function that runs `announce` with short data, for a call that is repeated.

        Args:
            call: Call without tables.
            shape: Shape of the data, which takes up to `inline_bytes`.

        Returns:
            Function that takes this rank's data and returns all ranks' data.
        """
        header, rank = packed(call, Location(INLINE)), self.rank
        nbytes = call.numel * call.dtype.itemsize
        with torch.inference_mode(False):  # kept for calls outside of it
            halves = [
                [block.view(call.dtype)[: call.numel].view(shape) for block in half]
                for half in self._inline
            ]
        own = [half[rank][: len(header)] for half in self._headers]
        data, move = [half[rank].data_ptr() for half in halves], _memmove()
        post, wait, shown = self._post_all, self._wait_for_all, self._shown
        parts, size = self._compared, self.size

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
            post()
            wait()
            if parts[parity].count(parts[parity][rank]) != size:
                self._check_consistent(tables=False)
            return halves[parity]

        return exchange

    def announcer(self, call: Call) -> Callable[[Location], None]:
        """Return a function that runs `announce` with a location, for a call that is repeated.

        Args:
            call: Call without tables and without data beside its header.
        """
        start, rank = packed(call, Location(INLINE))[:-LOCATION_BYTES], self.rank
        own = [half[rank] for half in self._headers]

        def announce(location: Location) -> None:
            self._next(call.kind)
            buffer, self._shown[self._parity] = own[self._parity], None
            buffer[: len(start)] = start
            write_location(buffer, location)
            if self._mark:
                write_mark(buffer, self._mark)
                self._mark = 0
            self._meet(tables=False)

        return announce

    def _next(self, kind: str) -> None:
        self._kind = kind
        self._parity ^= 1
        self._forget_last()

    def _forget_last(self) -> None:
        """Hook at the start of a collective: all ranks have ended the one before the last."""

    def _meet(self, *, tables: bool) -> None:
        self._post_all()
        self._wait_for_all()
        # takes less than 1 µs, and turns any mismatch into the same error on all ranks
        parts = self._compared[self._parity]
        fit = self.alike = parts.count(parts[self.rank]) == self.size
        if not fit or (tables and not torch.equal(*self._tables[self._parity])):
            self._check_consistent(tables=tables)

    def _check_consistent(self, *, tables: bool) -> None:
        try:
            check_consistent(self._headers[self._parity], self.rank, tables=tables)
        except MismatchError as error:
            self._mismatch = weakref.ref(error)
            raise

    def is_agreed(self, error: MismatchError) -> bool:
        """Return True if all ranks raise this error; False if a signal handler raised it here."""
        return self._mismatch is not None and error is self._mismatch()

    def call_of(self, rank: int) -> Call:
        """Return the announced call of a rank, in gather and scatter."""
        return read(self._headers[self._parity][rank])[0]

    def _write_inline(self, dtype: torch.dtype, blocks: Sequence[Tensor]) -> None:
        if len(blocks) == 1:
            self.all_inline(dtype, blocks[0].numel())[self.rank].copy_(blocks[0])
            return
        start = 0
        for block in blocks:
            if count := block.numel():  # in a gather most are empty
                self.inline(self.rank, dtype, start, count).copy_(block)
                start += count

    def locations(self) -> list[Location]:
        """Return the announced location of each rank's data."""
        headers, parts = self._headers[self._parity], self._located[self._parity]
        if parts.count(parts[0]) == self.size:
            return [location_of(headers[0])] * self.size
        return [location_of(header) for header in headers]

    def sends(self) -> list[list[int]]:
        """Return the announced number of elements from each rank for each, in calls with tables."""
        sent, _ = self._tables[self._parity]
        table: list[list[int]] = sent.tolist()
        return table

    def sync(self, partners: Sequence[int] | None = None) -> None:
        """Run a barrier: all ranks can then read what any rank wrote before it.

        Args:
            partners: Ranks that this one waits for, each of which waits for this one; all others if
                None. With few partners, the other ranks need no core for the barrier.
        """
        if partners is None:
            self._post_all()
            self._wait_for_all()
            return
        self.post(partners)
        self.wait(partners)

    def post(self, peers: Sequence[int]) -> None:
        """Signal peers, which wait for it, that this rank has finished reading their data."""
        self._semaphores.post(peers)

    def wait(self, peers: Sequence[int]) -> None:
        """Wait until these peers have posted that they have finished reading this rank's data."""
        self._semaphores.wait(peers, self._check_peers)

    def take_waits(self) -> dict[int, int] | None:
        """Return the ns that this rank waited for each other since the last call, or None."""
        taken = self._semaphores.waited
        if not taken:
            return None
        self._semaphores.waited = {}
        return taken

    def inline(self, rank: int, dtype: torch.dtype, start: int, count: int) -> Tensor:
        """Return elements of the data that a rank wrote beside its header."""
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

    def report_failure(self, reason: BaseException) -> None:
        """Report to the other ranks that this one failed, so that none waits for it."""
        self.links.report_failure(reason)

    def abort(self, error: DistributedError) -> None:
        """Make all waits of this rank fail; the first error counts."""
        self.links.aborted = self.links.aborted or error

    def close_in_child(self) -> None:
        """Close inherited sockets in a forked child."""
        self.links.close_in_child()

    def close(self) -> None:
        """Leave the group."""
        self.links.close()
        kept_views = (self._headers, self._compared, self._located, self._tables, self._inline)
        for kept in (*kept_views, self._views):
            kept.clear()
        self._placement.close()

    def _check_peers(self, missing: Sequence[int]) -> None:
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


@cache
def _memmove() -> Callable[[int, int, int], None]:
    """Return the C library's memmove, called with the GIL, which could take 5 ms to reacquire."""
    function = ctypes.PyDLL(None).memmove
    function.argtypes, function.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t), None
    return function
