"""A group on one rank: it has a state, a queue of operations, a record of them, and an end.

An operation whose caller waits runs in the caller's thread, the others in the group's thread.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple, Protocol
from weakref import WeakSet

import torch
from torch import Tensor
from torch.distributed import Work

from gradwire._processes import after_fork
from gradwire.errors import BrokenGroupError, DistributedError, MismatchError
from gradwire.recorder import Entry, RecordedGroup, record_end, record_error, record_start, ring
from gradwire.shm.across_hosts import AcrossHosts
from gradwire.shm.reduction import KnownCall, KnownCalls, SharedMemory
from gradwire.shm.tensors import flat_of, write_all_back
from gradwire.shm.work import Job, Queue, ShmWork, ended, without_frames

Observed = tuple[str, int, int, Sequence[Sequence[Tensor]]]
"""A collective: name of torch's operator, root, number of the reduce op, and tensors."""
UNOBSERVED: Observed = ("a collective", 0, 0, ())


class Observer(Protocol):
    """Observer of a group's collectives. Groups in C++ are observed by torch's dispatcher."""

    def sent(self, op: str, root: int, reduce: int, lists: Sequence[Sequence[Tensor]]) -> None:
        """Take note of a collective at its submission."""

    def polled(self, work: Work) -> Work:
        """Return the handle to use instead of a collective's own."""

    def watched(self, state: Any, run: Callable[[], bool]) -> bool:
        """Run a collective in this thread, and look for errors elsewhere while it waits."""


class Messages(Protocol):
    """Point-to-point messages of a group: `RingMessages`, or `EngineMessages` between hosts."""

    def send(self, group: Group, tensors: list[Tensor], dst: int, tag: int) -> Work:
        """Send a tensor."""

    def receive(self, group: Group, tensors: list[Tensor], src: int | None, tag: int) -> Work:
        """Fill a tensor with the next message of a tag; from any rank if `src` is None."""

    def fail_all(self, error: DistributedError) -> None:
        """Fail all pending receives."""

    def close(self) -> None:
        """Release memory after all receives have ended."""


State = SharedMemory | AcrossHosts


class _Marks(threading.local):
    next = 0


class Parts(NamedTuple):
    """Parts of a group on one rank."""

    state: State
    messages: Messages
    queue: Queue
    # timeout of operations without their own
    seconds: float
    known: KnownCalls | None = None


_GROUPS: WeakSet[Group] = WeakSet()
"""All groups of this process, for its handlers at fork and at exit."""
_JOINED: set[Group] = set()
"""Groups that this rank has not left: PyTorch's C++ keeps only their C++ part alive."""


class Group:
    """One rank of a group, from joining to leaving."""

    def __init__(self, parts: Parts) -> None:
        # `seconds`, the timeout of operations without their own, may be changed
        self.state, self.messages, self._queue, self.seconds, self.known = parts
        self._marks = _Marks()
        # reason for which this rank has left; "" while it is in the group
        self.closed = ""
        self._release_pending = False  # left amid an operation that still uses the memory
        self._failure: BaseException | None = None  # a copy, never raised itself
        self.recorded = RecordedGroup(self)
        # number of submitted collectives, equal on ranks that are in step
        self.submitted = 0
        self.observer: Observer | None = None
        _GROUPS.add(self)
        _JOINED.add(self)

    @property
    def teams(self) -> tuple[tuple[int, ...], ...]:
        """Ranks that share memory with each other: those of each host."""
        state = self.state
        return (tuple(range(state.size)),) if isinstance(state, SharedMemory) else state.teams.ranks

    @property
    def timeout(self) -> timedelta:
        """Timeout of operations without their own."""
        return timedelta(seconds=self.seconds)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of later operations without their own."""
        self.seconds = timeout.total_seconds()

    def allocate(self, nbytes: int) -> Tensor:
        """Allocate bytes in memory that the ranks of this host share."""
        self.check_usable()
        return self.state.allocate(nbytes)

    @property
    def failure(self) -> BaseException | None:
        """Error of the operation that made the group unusable, to be raised; None if usable."""
        return None if self._failure is None else without_frames(self._failure)

    def check_usable(self) -> None:
        """Raise a BrokenGroupError if this rank has left the group or an operation has failed."""
        if self.closed:
            raise BrokenGroupError(self.closed)
        if self._failure is not None:
            raise BrokenGroupError(
                "the group is unusable because an operation failed with "
                f"{type(self._failure).__name__}: {self._failure}; destroy it and make a new one"
            ) from self._failure

    def submit(
        self,
        job: Job,
        tensors: Sequence[Tensor],
        opts: Any,
        observed: Observed = UNOBSERVED,
        *,
        op: str = "collective",
        sources: Sequence[Tensor] | None = None,
    ) -> Work:
        """Run a job after all jobs submitted before."""
        # the job reads `sources` and fills `tensors`, which are the value of its future
        inputs = tensors if sources is None else sources
        entry = ring.begin(self.recorded, self._count(), op, inputs, tensors)
        if any(map(Tensor.is_inference, tensors)):
            # inference mode is per thread, and needed to write inference tensors
            job = torch.inference_mode()(job)
        return self._run_or_queue(job, tensors, opts, entry, observed)

    def submit_known(
        self, known: KnownCall, tensors: Sequence[Tensor], opts: Any, number: int
    ) -> Work:
        """Submit an all_reduce with a cached setup and the reduce op of this number."""
        if known.like is None:
            entry = ring.begin(self.recorded, self._count(), "all_reduce", tensors, tensors)
            if entry is not None and self.recorded.named:
                known.like = entry.copy()
        else:
            entry = ring.begin_again(known.like, self._count(), "a known all_reduce")
        job = partial(known, kept(tensors, opts)[0])
        observed = ("allreduce_", 0, number, (tensors,))
        return self._run_or_queue(job, tensors, opts, entry, observed)

    def _count(self) -> int:
        """Return the number of a new operation; raise if this rank can submit none."""
        self.check_usable()
        self._queue.check_not_inside()
        self.submitted += 1
        return self.submitted

    def submit_into(
        self,
        results: Sequence[Tensor],
        fill: Callable[[list[Tensor], list[Tensor]], None],
        opts: Any,
        op: str,
        sources: Sequence[Tensor],
        observed: Observed = UNOBSERVED,
    ) -> Work:
        """Submit a job that calls `fill` with the results and sources as 1-d contiguous tensors."""
        filled, read = kept(results, opts), kept(sources, opts)

        def job() -> None:
            flats = [flat_of(result) for result in filled]
            fill(flats, [flat_of(source) for source in read])
            write_all_back(filled, flats)

        return self.submit(job, results, opts, observed, op=op, sources=sources)

    def _run_or_queue(
        self,
        job: Job,
        tensors: Sequence[Tensor],
        opts: Any,
        entry: Entry | None,
        observed: Observed,
    ) -> Work:
        observer = self.observer
        if observer is not None:
            observer.sent(*observed)
        if mark := self._marks.next:
            self._marks.next = 0
        if torch._C._len_torch_dispatch_stack():
            job = _outside_modes(job, tensors)
        own = opts.timeout.total_seconds()
        seconds = own if own > 0 else self.seconds
        wait = not opts.asyncOp
        run = partial(self._run_at_once, job, mark, seconds, entry)
        # in a wait between hosts, only the observer's handle can look for errors elsewhere
        here = wait and (observer is None or isinstance(self.state, SharedMemory))
        if here and (run() if observer is None else observer.watched(self.state, run)):
            return ended(tensors)
        work = ShmWork(tensors)
        handle: Work = work if observer is None else observer.polled(work)
        try:
            self._queue.submit(partial(self._run, job, mark, seconds, entry), work)
            if wait:
                handle.wait()
        finally:
            self._release_if_left()
        return handle

    def _run_at_once(self, job: Job, mark: int, seconds: float, entry: Entry | None) -> bool:
        """Run an operation in this thread; return False if others are pending in the queue."""
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
            if self._release_pending:
                self._release_if_left()
        return True

    def _run(self, job: Job, mark: int, seconds: float, entry: Entry | None) -> None:
        """Run an operation; an error makes the group unusable."""
        self.check_usable()  # an earlier operation may have failed
        state = self.state
        failure: BaseException | None = None
        if entry is not None:
            record_start(entry)
        state.begin(mark, seconds)
        try:
            job()
        except MismatchError as error:
            failure = error
            if not state.is_agreed(error):
                self.fail(error)
            raise  # otherwise raised on all ranks before any data moved: the group stays usable
        except BaseException as error:
            failure = error
            self.fail(error)
            raise
        finally:
            if entry is not None:
                record_end(entry, state.take_waits())
            if failure is not None:
                record_error(failure, entry)
                failure = None  # its traceback refers to this frame: a cycle

    @contextmanager
    def marked(self, mark: int) -> Iterator[None]:
        """Send a mark in the header of this thread's next collective in the block."""
        # A nonzero number of 64 bits, which must be equal on all ranks if all ranks send one. If
        # marks differ, all ranks raise: CheckedMismatchError if the lowest bit is set in all of
        # them, else MismatchError.
        self._marks.next = mark
        try:
            yield
        finally:
            self._marks.next = 0

    # --- the end ---

    def fail(self, error: BaseException) -> None:
        """Make the group unusable, and report the error to the other ranks."""
        if self._failure is None:
            self._failure = without_frames(error)
            self.state.report_failure(error)

    def shutdown(self) -> None:
        """Leave the group; peers that still wait for this rank get an error."""
        self._leave("the group was destroyed on this rank: make a new one")

    def _leave(self, reason: str) -> None:
        _JOINED.discard(self)
        joined, self.closed = not self.closed, reason
        if not joined:
            return
        if self._queue.runs_in_this_thread():
            # a signal handler called this amid an operation of this thread, which still uses the
            # memory. The operation fails when the handler returns, and its end then releases
            self.state.abort(BrokenGroupError(reason))
            self._release_pending = True
        else:
            self._release()

    def abort(self) -> None:
        """Leave the group at once; pending operations fail."""
        if not self.closed:
            error = BrokenGroupError("the group was aborted on this rank")
            self.fail(error)
            self.state.abort(error)
            self.messages.fail_all(error)
            self._leave("the group was aborted on this rank: make a new one")

    def _release_if_left(self) -> None:
        if self._release_pending and not self._queue.runs_in_this_thread():
            self._release()

    def _release(self) -> None:
        """Leave the group; no operation of this thread uses its memory any more."""
        self._release_pending = False
        self._queue.close()
        if self.known is not None:
            self.known.clear()
        self.state.close()
        error = BrokenGroupError(self.closed)
        self.state.abort(error)
        self.messages.fail_all(error)
        # parts of a group refer to each other: without this, rings would stay until garbage is
        # collected
        self.messages.close()


def _outside_modes(job: Job, tensors: Sequence[Tensor]) -> Job:
    """Return a job that modes of `__torch_dispatch__` do not see, as in the group's thread."""
    # They see a write to each of its tensors: allow_mutation_on_saved_tensors keeps the values.
    for tensor in tensors:
        if tensor.layout == torch.strided and not tensor.is_inference():
            with torch.no_grad():
                tensor.copy_(tensor)

    def run() -> None:
        with torch._C._DisableTorchDispatch():
            job()

    return run


def _at_exit() -> None:
    """End the groups' threads: a thread that runs a kernel at the interpreter's exit crashes."""
    for group in list(_GROUPS):
        # an operation in which all ranks take part still ends; a wait for absent ranks must not
        # delay the process's exit
        if not group.closed:
            group.state.abort(BrokenGroupError("the process of this rank ends"))
        group.shutdown()


def _in_child() -> None:
    """Close inherited sockets in a forked child, in which groups cannot be used."""
    for group in list(_GROUPS):
        if not group.closed:
            group.closed = "this process was forked from a rank: only the rank can use its groups"
            group.state.close_in_child()


atexit.register(_at_exit)
after_fork(_in_child)


def kept(tensors: Sequence[Tensor], opts: Any) -> Sequence[Tensor]:
    """Return tensors that a job uses instead of the caller's, which may change meanwhile."""
    # After the operation was submitted, torch may set requires_grad on a caller's tensor, such as
    # an output of `all_gather_into_tensor` whose input requires grad. The caller may put other
    # tensors into the list, or other memory into a tensor (`x.data = y`).
    return [tensor.detach() for tensor in tensors] if opts.asyncOp else tensors
