"""The base of the shm groups: how operations are submitted, and how a rank leaves the group."""

# torch's stubs give overloads and names that its own callers do not use on a backend
# mypy: disable-error-code="override,assignment"

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from time import perf_counter_ns
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.distributed import Work

from gradwire.errors import (
    ArgumentError,
    BrokenGroupError,
    DistributedError,
    MismatchError,
)
from gradwire.recorder import ENDED, STARTED, WAITS, Entry, RecordedGroup, failed, ring
from gradwire.shm.algorithms import Algorithms, InSharedMemory
from gradwire.shm.group_state import GroupState
from gradwire.shm.incoming import Incoming
from gradwire.shm.links import Kind, Message
from gradwire.shm.mailbox import Mailbox
from gradwire.shm.outgoing import Outgoing
from gradwire.shm.sync import Deadline
from gradwire.shm.tensors import flat_of, write_all_back
from gradwire.shm.work import Prepared, Queue, ShmWork

__all__ = ["GroupBase"]

_GROUPS: WeakSet[GroupBase] = WeakSet()
"""All groups of this process, for the handlers of its fork and its exit."""

Job = Callable[[], None]
Observer = Callable[[str, int, Sequence[Sequence[Tensor]]], None]
"""Called with each collective as it is submitted: its name among torch's operators, its root, and
the tensors. Groups that are written in C++ are observed through torch's dispatcher instead."""


class _Marks(threading.local):
    next = 0


class GroupBase:
    """One rank of a group, without its operations; usable after `_join`.

    Args:
        timeout: For each operation that has none of its own.

    Attributes:
        observer: Called with each collective as it is submitted, if there is one.
    """

    def __init__(self, timeout: timedelta) -> None:
        self._timeout = timeout
        self._broken: BaseException | None = None
        self._closed = "the group has no members yet"  # the reason it is not usable; "" if it is
        self.observer: Observer | None = None
        self._submitted = 0
        self._leaving = False  # whether `_release` is still to be called
        self._marks = _Marks()
        self._recorded = RecordedGroup(self)
        _GROUPS.add(self)

    def _join(self, rank: int, size: int, peers: dict[int, Any], deadline: Deadline) -> None:
        """Form the group with the ranks that `peers` are connections to."""
        self._rank, self._size = rank, size
        self._mailbox = Mailbox()
        self._incoming: dict[int, Incoming] = {}
        self._outgoing: dict[int, Outgoing] = {}
        state = GroupState(rank, size, peers, self._deliver, self._on_lost, deadline)
        self._state, links = state, state.links
        self._algorithms: Algorithms = InSharedMemory(state)
        for peer in peers:
            find, make = partial(state.find_ring, peer), partial(state.make_ring, peer)
            self._incoming[peer] = Incoming(peer, links, self._mailbox, find)
            self._outgoing[peer] = Outgoing(peer, links, make)
        self._queue = Queue(f"gradwire-shm-{rank}")
        links.start()  # not before: a peer may have sent already
        self._broken, self._closed = None, ""

    # --- properties ---

    def getBackendName(self) -> str:
        """The backend's name."""
        return "shm"

    @property
    def failure(self) -> BaseException | None:
        """The error of the operation that made the group unusable, if one did."""
        return self._broken

    @property
    def timeout(self) -> timedelta:
        """The timeout of operations that have none of their own."""
        return self._timeout

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of later operations that have none of their own."""
        self._timeout = timeout

    def allocate(self, nbytes: int) -> Tensor:
        """Allocate bytes in memory that the ranks share."""
        self._check_usable()
        return self._state.allocate(nbytes)

    # --- leaving ---

    def shutdown(self) -> None:
        """Leave the group; peers that still wait for this rank get an error."""
        self._leave("the group was destroyed on this rank: make a new one")

    def _leave(self, reason: str) -> None:
        joined, self._closed = not self._closed, reason
        if not joined:
            return
        if self._queue.runs_in_this_thread():
            # called from a signal handler that interrupted an operation of this thread: that still
            # uses the memory. It fails when the handler returns, and `_submit` then releases
            self._state.links.aborted = BrokenGroupError(reason)
            self._leaving = True
        else:
            self._release()

    def _release(self) -> None:
        self._leaving = False
        self._queue.close()
        self._state.close()
        links, error = self._state.links, BrokenGroupError(self._closed)
        links.aborted = links.aborted or error
        self._fail_receives(error)

    def abort(self) -> None:
        """Leave the group at once; operations in flight fail."""
        if not self._closed:
            error = BrokenGroupError("the group was aborted on this rank")
            self._break(error)
            self._state.links.aborted = error
            self._fail_receives(error)
            self._leave("the group was aborted on this rank: make a new one")

    def _leave_at_exit(self) -> None:
        # an operation that all ranks take part in still ends; the wait for one that they do not
        # must not delay the process's exit
        if not self._closed:
            self._state.links.aborted = BrokenGroupError("the process of this rank ends")
        self.shutdown()

    def _leave_in_child(self) -> None:
        if not self._closed:
            self._closed = "this process was forked from a rank: only the rank can use its groups"
            self._state.links.close_in_child()

    def _get_sequence_number_for_group(self) -> int:
        """How many collectives were submitted: equal on ranks that are in step."""
        return self._submitted

    # --- operations ---

    def _submit(
        self,
        job: Job,
        tensors: Sequence[Tensor],
        opts: Any,
        observed: tuple[str, int, Sequence[Sequence[Tensor]]] = ("a collective", 0, ()),
        *,
        op: str = "collective",
        sources: Sequence[Tensor] | None = None,
    ) -> Work:
        """Run a job in its turn.

        Args:
            job: What the collective does.
            tensors: What it fills, and the value of its future.
            opts: torch's options; its timeout and `asyncOp` are used.
            observed: What the observer is called with.
            op: The collective's name in the recorder.
            sources: What it reads, if not `tensors`.
        """
        self._check_usable()
        self._submitted += 1
        inputs = tensors if sources is None else sources
        entry = ring.begin(self._recorded, self._submitted, op, inputs, tensors)
        if self.observer is not None:
            self.observer(*observed)
        mark = self._take_mark()
        inference = any(map(Tensor.is_inference, tensors))
        own = opts.timeout.total_seconds()
        seconds = own if own > 0 else self._timeout.total_seconds()
        guarded = self._guarded(job, mark, seconds, [entry], inference=inference)
        try:
            return self._queue.submit(guarded, ShmWork(tensors), wait=not opts.asyncOp)
        finally:
            if self._leaving and not self._queue.runs_in_this_thread():
                self._release()

    def _guarded(
        self, job: Job, mark: int, seconds: float, present: list[Entry | None], *, inference: bool
    ) -> Job:
        """A job after whose errors the group cannot be used.

        Args:
            job: The job.
            mark: What its first header carries.
            seconds: For all of its waits.
            present: The recorder's entry of the run that is present: a job may be run again.
            inference: Whether it fills inference tensors.
        """

        def guarded() -> None:
            self._check_usable()
            entry = present[0]
            if entry is not None:
                entry[STARTED] = perf_counter_ns()
            self._state.begin(mark, seconds)
            failure: BaseException | None = None
            try:
                # inference tensors can be written in inference mode alone, which is thread-local
                if inference:
                    with torch.inference_mode():
                        job()
                else:
                    job()
            except MismatchError as error:
                failure = error
                raise  # on all ranks, before any data moved: the group stays usable
            except BaseException as error:
                failure = error
                self._break(error)
                raise
            finally:
                if entry is not None:
                    entry[ENDED], entry[WAITS] = perf_counter_ns(), self._state.take_waits()
                if failure is not None:
                    failed(failure, entry)

        return guarded

    def prepare(
        self, job_of: Callable[[GroupState], Job], tensors: Sequence[Tensor], *, short: bool
    ) -> Prepared:
        """Prepare an operation that `start` and `finish` run again and again.

        Args:
            job_of: Gives what it does.
            tensors: What it fills.
            short: Whether `finish` runs it.
        """
        seconds, inference = self._timeout.total_seconds(), any(map(Tensor.is_inference, tensors))
        present: list[Entry | None] = [None]
        guarded = self._guarded(job_of(self._state), 0, seconds, present, inference=inference)
        return Prepared(guarded, tensors, short, present)

    def start(self, prepared: Prepared) -> None:
        """Begin a prepared operation, which `finish` ends; a short one is run there."""
        self._check_usable()
        self._submitted += 1
        tensors = prepared.tensors
        entry = ring.begin(self._recorded, self._submitted, "all_reduce", tensors, tensors)
        prepared.present[0] = entry
        if self.observer is not None:
            self.observer("allreduce_", 0, [prepared.tensors])
        if prepared.short:
            self._queue.hold(prepared)
        else:
            prepared.work = self._queue.submit(prepared.job, ShmWork(prepared.tensors), wait=False)

    def finish(self, prepared: Prepared) -> None:
        """Wait for a prepared operation to end.

        Raises:
            DistributedError: The operation failed.
        """
        try:
            self._queue.finish(prepared)
        finally:
            if self._leaving and not self._queue.runs_in_this_thread():
                self._release()

    def _submit_into(
        self,
        results: Sequence[Tensor],
        fill: Callable[[list[Tensor]], None],
        opts: Any,
        op: str,
        sources: Sequence[Tensor],
    ) -> Work:
        """Submit a job that fills the results; it is given each as a 1-d contiguous tensor."""

        def job() -> None:
            flats = [flat_of(result) for result in results]
            fill(flats)
            write_all_back(results, flats)

        return self._submit(job, results, opts, op=op, sources=sources)

    @contextmanager
    def marked(self, mark: int) -> Iterator[None]:
        """Send a mark in the header of the next collective that this thread submits in the block.

        Args:
            mark: 64 bits, not all zero, which must be equal on all ranks if all ranks send one. If
                they differ, all ranks raise: CheckedMismatchError if the lowest bit is set in all
                of them, else MismatchError.
        """
        self._marks.next = mark
        try:
            yield
        finally:
            self._marks.next = 0

    def _take_mark(self) -> int:
        mark = self._marks.next
        if mark:
            self._marks.next = 0
        return mark

    def _break(self, error: BaseException) -> None:
        if self._broken is None:
            self._broken = error
            self._state.links.report_failure(error)

    def _check_usable(self) -> None:
        if self._closed:
            raise BrokenGroupError(self._closed)
        if self._broken is not None:
            raise BrokenGroupError(
                "the group cannot be used since an operation failed with "
                f"{type(self._broken).__name__}: {self._broken}; destroy it and make a new one"
            ) from self._broken

    def _root(self, opts: Any) -> int:
        root: int = opts.rootRank
        if not 0 <= root < self._size:
            raise ArgumentError(f"root is rank {root}: the group's ranks are 0 to {self._size - 1}")
        return root

    def _check_peer(self, peer: int, name: str) -> None:
        if not 0 <= peer < self._size or peer == self._rank:
            raise ArgumentError(
                f"{name} is rank {peer}: give another rank of the group than this one "
                f"({self._rank}), from 0 to {self._size - 1}"
            )

    def _one_each(self, tensors: list[Tensor], name: str) -> list[Tensor]:
        if len(tensors) != self._size:
            raise ArgumentError(
                f"{name} has {len(tensors)} tensors: give one for each of {self._size} ranks"
            )
        return tensors

    def _check_parts(self, *, whole: Tensor, part: Tensor) -> None:
        if whole.numel() != part.numel() * self._size:
            raise ArgumentError(
                f"the larger tensor has {whole.numel()} elements: it needs "
                f"{self._size} times {part.numel()} of the smaller"
            )

    def _deliver(self, peer: int, message: Message) -> Callable[[], None] | None:
        incoming = self._incoming[peer]
        if message.kind == Kind.WAKE:
            return incoming.wake
        incoming.add_rest(message)
        return incoming.look

    def _on_lost(self, peer: int) -> Callable[[], None] | None:
        return self._incoming[peer].look

    def _fail_receives(self, error: DistributedError) -> None:
        """Fail all receives, posted or half filled; the links have the reason why as well."""
        with self._state.links.lock:
            self._mailbox.fail_all(error)
        for incoming in self._incoming.values():
            incoming.look()


def _at_exit() -> None:
    """End the groups' threads: one that runs a kernel while the interpreter exits would crash."""
    for group in list(_GROUPS):
        group._leave_at_exit()


def _in_child() -> None:
    for group in list(_GROUPS):
        group._leave_in_child()


atexit.register(_at_exit)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
