"""Submission of a group's operations: they run in order, are recorded, and end the group on errors.

An operation whose caller waits runs in the caller's thread, the others in the group's thread.
"""

# mypy: disable-error-code="assignment"

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Work

from gradwire.errors import BrokenGroupError, MismatchError
from gradwire.recorder import Entry, RecordedGroup, failed, record_end, record_start, ring
from gradwire.shm.algorithms.group_state import GroupState
from gradwire.shm.algorithms.known_calls import KnownCall
from gradwire.shm.memory.tensors import aliases, flat_of, write_all_back
from gradwire.shm.runtime.operation_queue import Job, Queue
from gradwire.shm.runtime.work import ShmWork, ended, without_frames

Observed = tuple[str, int, int, Sequence[Sequence[Tensor]]]
"""A collective: name of torch's operator, root, number of the reduce op, and tensors."""
UNOBSERVED: Observed = ("a collective", 0, 0, ())
Observer = Callable[[str, int, int, Sequence[Sequence[Tensor]]], None]
"""Function called with the fields of `Observed` for each collective at submission. Groups in C++
are observed through torch's dispatcher instead."""


class _Marks(threading.local):
    next = 0


class Submission:
    """Part of a group that runs its operations.

    Args:
        timeout: Timeout of operations without their own.

    Attributes:
        observer: Function called with each collective at its submission, or None.
    """

    _state: GroupState
    _queue: Queue

    def __init__(self, timeout: timedelta) -> None:
        self._timeout = timeout
        self._seconds = timeout.total_seconds()
        self._broken: BaseException | None = None  # a copy, never raised itself
        self._closed = "the group has no members yet"  # why the group is unusable; "" if usable
        self.observer: Observer | None = None
        self._submitted = 0
        self._leaving = False  # whether `_release` must still be called
        self._marks = _Marks()
        self._recorded = RecordedGroup(self)

    @property
    def failure(self) -> BaseException | None:
        """Error of the operation that made the group unusable, to be raised; None if usable."""
        return None if self._broken is None else without_frames(self._broken)

    @property
    def timeout(self) -> timedelta:
        """Timeout of operations without their own."""
        return self._timeout

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of later operations without their own."""
        self._timeout, self._seconds = timeout, timeout.total_seconds()

    def _get_sequence_number_for_group(self) -> int:
        """Return the number of submitted collectives, equal on ranks that are in step."""
        return self._submitted

    def _submit(
        self,
        job: Job,
        tensors: Sequence[Tensor],
        opts: Any,
        observed: Observed = UNOBSERVED,
        *,
        op: str = "collective",
        sources: Sequence[Tensor] | None = None,
    ) -> Work:
        """Run a job after all jobs submitted before.

        Args:
            job: Function that runs the collective.
            tensors: Tensors that it fills, which are the value of its future.
            opts: torch's options, of which the timeout and `asyncOp` are used.
            observed: Arguments for the observer.
            op: Name of the collective in the recorder.
            sources: Tensors that it reads, if not `tensors`.
        """
        self.check_usable()
        self._submitted += 1
        inputs = tensors if sources is None else sources
        entry = ring.begin(self._recorded, self._submitted, op, inputs, tensors)
        if any(map(Tensor.is_inference, tensors)):
            job = partial(_in_inference_mode, job)
        return self._run_or_queue(job, tensors, opts, observed, entry)

    def _submit_known(
        self, known: KnownCall, tensors: Sequence[Tensor], opts: Any, number: int
    ) -> Work:
        """Submit an all_reduce with a cached setup and the reduce op of this number."""
        self.check_usable()
        self._submitted += 1
        entry = self._record_known(known, tensors)
        observed = ("allreduce_", 0, number, (tensors,))
        job = partial(known, self._kept(tensors, opts)[0])
        return self._run_or_queue(job, tensors, opts, observed, entry)

    def _record_known(self, known: KnownCall, tensors: Sequence[Tensor]) -> Entry | None:
        if known.like is not None:
            return ring.begin_again(known.like, self._submitted, "a known all_reduce")
        entry = ring.begin(self._recorded, self._submitted, "all_reduce", tensors, tensors)
        if entry is not None and self._recorded.named:
            known.like = entry.copy()
        return entry

    def _run_or_queue(
        self,
        job: Job,
        tensors: Sequence[Tensor],
        opts: Any,
        observed: Observed,
        entry: Entry | None,
    ) -> Work:
        if self.observer is not None:
            self.observer(*observed)
        mark, own = self._take_mark(), opts.timeout.total_seconds()
        seconds = own if own > 0 else self._seconds
        wait = not opts.asyncOp
        if wait and self._run_at_once(job, mark, seconds, entry):
            return ended(tensors)
        work = ShmWork(tensors)
        try:
            self._queue.submit(partial(self._run_queued, job, mark, seconds, entry), work)
            if wait:
                work.wait()
        finally:
            self._release_if_left()
        return work

    def _run_at_once(self, job: Job, mark: int, seconds: float, entry: Entry | None) -> bool:
        """Run an operation in this thread; return False if others are pending in the queue."""
        self._queue.check_not_inside()
        try:
            if not self._queue.enter():
                return False
            self._run(job, mark, seconds, entry)
        finally:
            # whatever `enter` returned: a signal handler may have raised at that moment
            try:
                self._queue.leave()
            except BaseException:  # or it raises now
                self._queue.leave()
                raise
            if self._leaving:
                self._release_if_left()
        return True

    def _run_queued(self, job: Job, mark: int, seconds: float, entry: Entry | None) -> None:
        self.check_usable()  # an earlier operation may have failed
        self._run(job, mark, seconds, entry)

    def _run(self, job: Job, mark: int, seconds: float, entry: Entry | None) -> None:
        """Run an operation; an error makes the group unusable.

        Args:
            job: Function that runs the operation.
            mark: Mark in its first header.
            seconds: Time limit for all of its waits together.
            entry: Entry of the recorder.
        """
        state, failure = self._state, None
        if entry is not None:
            record_start(entry)
        state.begin(mark, seconds)
        try:
            job()
        except MismatchError as error:
            failure = error
            if not state.is_agreed(error):
                self._break(error)
            raise  # otherwise raised on all ranks before any data moved: the group stays usable
        except BaseException as error:
            failure = error
            self._break(error)
            raise
        finally:
            if entry is not None:
                record_end(entry, state.take_waits())
            if failure is not None:
                failed(failure, entry)
                failure = None  # its traceback refers to this frame: a cycle

    def _release_if_left(self) -> None:
        if self._leaving and not self._queue.runs_in_this_thread():
            self._release()

    @abstractmethod
    def _release(self) -> None:
        """Leave the group; no operation of this thread uses its memory any more."""

    def _submit_into(
        self,
        results: Sequence[Tensor],
        fill: Callable[[list[Tensor], list[Tensor]], None],
        opts: Any,
        op: str,
        sources: Sequence[Tensor],
        observed: Observed = UNOBSERVED,
    ) -> Work:
        """Submit a job that calls `fill` with the results and sources as 1-d contiguous tensors."""
        filled, read = self._kept(results, opts), self._kept(sources, opts)

        def job() -> None:
            flats = [flat_of(result) for result in filled]
            fill(flats, [flat_of(source) for source in read])
            write_all_back(filled, flats)

        return self._submit(job, results, opts, observed, op=op, sources=sources)

    @staticmethod
    def _kept(tensors: Sequence[Tensor], opts: Any) -> Sequence[Tensor]:
        """Return tensors that a job uses instead of the caller's, which may change meanwhile."""
        return aliases(tensors) if opts.asyncOp else tensors

    @contextmanager
    def marked(self, mark: int) -> Iterator[None]:
        """Send a mark in the header of the next collective that this thread submits in the block.

        Args:
            mark: Nonzero number of 64 bits, which must be equal on all ranks if all ranks send one.
                If marks differ, all ranks raise: CheckedMismatchError if the lowest bit is set in
                all of them, else MismatchError.
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
            self._broken = without_frames(error)
            self._state.links.report_failure(error)

    def check_usable(self) -> None:
        """Raise a BrokenGroupError if this rank has left the group or an operation has failed."""
        if self._closed:
            raise BrokenGroupError(self._closed)
        if self._broken is not None:
            raise BrokenGroupError(
                "the group is unusable because an operation failed with "
                f"{type(self._broken).__name__}: {self._broken}; destroy it and make a new one"
            ) from self._broken


def _in_inference_mode(job: Job) -> None:
    """Run a job in inference mode, which is per thread and needed to write inference tensors."""
    with torch.inference_mode():
        job()
