"""The handle that a collective returns, and the queue that runs asynchronous ones in a thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from queue import SimpleQueue

import torch
from torch import Tensor
from torch.distributed import Work

from gradwire._torch import outside_graphs
from gradwire.errors import BrokenGroupError, CollectiveTimeoutError, NotSupportedError
from gradwire.recorder import Entry

__all__ = ["Job", "Prepared", "Queue", "ShmWork", "ended", "wait_until"]

_STATE = threading.RLock()
"""Held while an operation is marked as done; one for all, as making one takes longer than a small
operation."""
_WAITING: list[threading.Lock] = []
"""A lock for each thread that waits for any operation, which is released when one is done. A
condition would not do: an exception of a signal's handler can leave its lock held for ever."""
_MISSED_SECONDS = 0.5  # after which a wait looks again: an exception may have ended `_tell_waiting`


def wait_until(done: Callable[[], bool], seconds: float | None) -> bool:
    """Wait until something that an operation's end makes true is true; whether it is."""
    end = None if seconds is None else time.monotonic() + seconds
    while not done():
        left = _MISSED_SECONDS if end is None else min(end - time.monotonic(), _MISSED_SECONDS)
        if left <= 0:
            return False
        told = threading.Lock()
        told.acquire()
        try:
            _WAITING.append(told)
            if not done():
                told.acquire(timeout=left)
        finally:
            with suppress(ValueError):
                _WAITING.remove(told)
    return True


def _tell_waiting() -> None:
    for told in list(_WAITING):
        with suppress(RuntimeError):  # it was told already
            told.release()


@outside_graphs
class ShmWork(Work):
    """The handle of one operation.

    Args:
        tensors: The value of its future.
        default_timeout: Seconds that `wait` waits if it is given none; None for no limit.
        on_timeout: Called when `wait` times out.
        callbacks_in_own_thread: Whether its future's callbacks run in a thread of their own, and
            not in the one that calls `finish`. The links' thread would deadlock in a callback that
            waits.
    """

    # of the class until they change: setting them takes as long as a small operation
    _done = False
    _error: BaseException | None = None
    _future: torch.futures.Future[list[Tensor]] | None = None
    _source = -1
    _callbacks_in_own_thread = False

    def __init__(
        self,
        tensors: Sequence[Tensor],
        default_timeout: float | None = None,
        on_timeout: Callable[[], None] | None = None,
        *,
        callbacks_in_own_thread: bool = False,
    ) -> None:
        Work.__init__(self)
        self._tensors = list(tensors)
        self._default_timeout, self._on_timeout = default_timeout, on_timeout
        self._callbacks_in_own_thread = callbacks_in_own_thread

    def finish(self, error: BaseException | None = None, source: int = -1) -> None:
        """Mark it as done; `source` is the rank that a received tensor came from."""
        with _STATE:
            self._error, self._source, self._done = error, source, True
            future = self._future
        _tell_waiting()
        if future is not None and self._callbacks_in_own_thread:
            threading.Thread(target=future.set_result, args=(self._tensors,), daemon=True).start()
        elif future is not None:
            future.set_result(self._tensors)

    def wait_until_done(self) -> None:
        """Wait without a limit; for operations that depend on no other rank any more."""
        self._wait(None)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait until it is done; with a timeout of zero or less, for the operation's own.

        Raises:
            CollectiveTimeoutError: It is not done in time.
            DistributedError: The operation failed.
        """
        if not self._done:
            given = timeout.total_seconds()
            seconds = given if given > 0 else self._default_timeout
            if not self._wait(seconds):
                if self._on_timeout is not None:
                    self._on_timeout()
                if not self._done:  # a receive may have been finished while `on_timeout` ran
                    raise CollectiveTimeoutError(f"the operation is not done after {seconds:g} s")
        if self._error is not None:
            raise self._error
        return True

    def _wait(self, seconds: float | None) -> bool:
        """Wait for so long; whether it is done."""
        return wait_until(self.is_completed, seconds)

    def synchronize(self) -> None:
        """As `wait`."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether it is done, with or without an error."""
        return self._done

    def is_success(self) -> bool:
        """Whether it is done without an error."""
        return self._done and self._error is None

    def exception(self) -> BaseException | None:
        """Why it failed, if it did."""
        return self._error

    def result(self) -> list[Tensor]:
        """The tensors it was to fill."""
        return self._tensors

    def source_rank(self) -> int:
        """The rank that a received tensor came from."""
        return self._source

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """A future of the tensors."""
        with _STATE:
            if self._future is None:
                # set_exception on it would crash torch's C++ callers; raising in `then` does not
                self._future = torch.futures.Future()
                self._chained = self._future.then(self._outcome)
                done = self._done
            else:
                done = False
        if done:
            self._future.set_result(self._tensors)
        return self._chained

    def _outcome(self, future: torch.futures.Future[list[Tensor]]) -> list[Tensor]:
        if self._error is not None:
            raise self._error
        return future.value()


class _EndedWork(ShmWork):
    """The handle of an operation that has ended well; made in half the time."""

    _done = True
    __init__ = Work.__init__


def ended(tensors: Sequence[Tensor]) -> ShmWork:
    """The handle of an operation that has ended well and filled these tensors."""
    work: ShmWork = _EndedWork()
    work._tensors = list(tensors)
    return work


Job = Callable[[], None]


@dataclass(slots=True)
class Prepared:
    """An operation that is run again and again.

    Args:
        job: What it does.
        tensors: What it fills.
        short: Whether it is run by who waits for it, unless others come in between.
        queued: Runs it in the group's thread.
        entry: The recorder's of the present run.
        like: The recorder's of an earlier run, as it was begun.
        work: The handle of the present run, if a thread has or gets it.
    """

    job: Job
    tensors: Sequence[Tensor]
    short: bool
    queued: Callable[[Prepared], None]
    entry: Entry | None = None
    like: Entry | None = None
    work: ShmWork | None = None


class Queue:
    """Runs operations one at a time, in the order of the calls.

    An operation whose caller waits is run by the caller, between `enter` and `leave`, if none is
    before it, which saves two switches of threads; all others run in a thread that is started for
    the first of them.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._running = threading.Lock()  # held by the thread that runs an operation
        # reentrant: a signal handler may submit in the thread that holds it
        self._order = threading.RLock()
        self._pending = 0
        self._jobs: SimpleQueue[tuple[Job, ShmWork] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._inline_in = 0  # the thread that runs an operation it submitted; 0 for none
        self._closed = False
        self._held: Prepared | None = None

    def enter(self) -> bool:
        """Let this thread run an operation, if nothing is before it; whether it may.

        Raises:
            BrokenGroupError, NotSupportedError: As of `submit`.
        """
        with self._order:
            self._check_open()
            if self._pending or self._inline_in or self._held is not None or self._is_threads():
                return False
            self._enter()
        return True

    def leave(self) -> None:
        """The operation that this thread entered for has ended."""
        self._running.release()  # before `_inline_in` is reset, as in `_enter`
        self._inline_in = 0

    def _enter(self) -> None:
        # before the lock is acquired: a signal handler that runs between the two would wait for
        # its own thread if it were not refused
        self._inline_in = threading.get_ident()
        self._running.acquire()

    def hold(self, prepared: Prepared) -> bool:
        """Keep an operation for `take`, or the thread once there are others; whether it is kept.

        Raises:
            BrokenGroupError, NotSupportedError: As of `submit`.
        """
        with self._order:
            self._check_open()
            if self._pending or self._inline_in or self._held is not None:
                return False
            self._held = prepared
        return True

    def take(self, prepared: Prepared) -> bool:
        """`enter` for an operation if it is held; whether it is."""
        with self._order:
            if self._held is not prepared:
                return False
            self._held = None
            self._enter()
        return True

    def submit(self, job: Job, work: ShmWork) -> ShmWork:
        """Run a job in its turn.

        Raises:
            BrokenGroupError: The queue was closed.
            NotSupportedError: This thread is in a job already, which a signal interrupted.
        """
        with self._order:
            self._check_open()
            if self._held is not None:
                held, self._held = self._held, None
                held.work = ShmWork(held.tensors)
                self._enqueue(partial(held.queued, held), held.work)
            self._enqueue(job, work)
        if self._is_threads():
            # called by a future's callback, which may wait for the operation: no other thread runs
            # it, so run what is pending here
            self._run(until=work)
        return work

    def _enqueue(self, job: Job, work: ShmWork) -> None:
        self._pending += 1
        self._start()
        self._jobs.put((job, work))

    def _check_open(self) -> None:
        if self.runs_in_this_thread():
            raise NotSupportedError(
                "this thread is in another operation of the group, which a signal interrupted: let "
                "the signal's handler set a flag, and call the operation after the interrupted one"
            )
        if self._closed:
            raise BrokenGroupError("the group was destroyed on this rank: make a new one")

    def _is_threads(self) -> bool:
        return self._thread is not None and threading.current_thread() is self._thread

    def runs_in_this_thread(self) -> bool:
        """Whether this thread runs a job, which a signal handler or a finalizer has interrupted."""
        return self._inline_in == threading.get_ident()

    def close(self) -> None:
        """Refuse new jobs, run the submitted ones, then end the thread; not from within a job."""
        with self._order:
            self._closed, self._held = True, None  # what was held was begun by nobody
        with self._running:
            pass  # wait for an operation that runs in a caller's thread
        if self._thread is not None:
            self._jobs.put(None)
            if not self._is_threads():
                self._thread.join()
            self._thread = None

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()

    def _run(self, until: ShmWork | None = None) -> None:
        """Run submitted jobs up to and including `until`; if that is None, until `close`."""
        while until is None or not until.is_completed():
            item = self._jobs.get()
            if item is None:
                self._jobs.put(None)  # for the `_run` further up this thread's stack
                return
            job, work = item
            error: BaseException | None = None
            with self._running:
                try:
                    job()
                except BaseException as raised:
                    error = raised
                with self._order:
                    self._pending -= 1
            work.finish(error)
            del item, job, work, error  # keep no tensors alive while waiting for the next job
