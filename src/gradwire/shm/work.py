"""Handles of operations, copies of their errors, and the queue in which operations run."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from queue import SimpleQueue

import torch
from torch import Tensor
from torch.distributed import Work

from gradwire._torch import outside_graphs
from gradwire.errors import (
    BrokenGroupError,
    CollectiveTimeoutError,
    DistributedError,
    NotSupportedError,
)
from gradwire.shm.semaphores import MainThread

_STATE = threading.RLock()
"""Lock held while an operation is marked as done; shared, as making one takes longer than a small
operation."""
_WAITING: list[threading.Lock] = []
"""Lock of each thread that waits for any operation, released when one is done. Not a condition: a
signal handler's exception can leave its lock held for ever."""
_RECHECK_SECONDS = 0.5  # a wait checks again: an exception may have interrupted `_notify`


def wait_until(done: Callable[[], bool], seconds: float | None) -> bool:
    """Wait for a condition that the end of an operation makes true; return False on timeout."""
    is_main = threading.current_thread() is threading.main_thread()
    end = None if seconds is None else time.monotonic() + seconds
    try:
        if is_main:
            MainThread.awaited = done
        while not done():
            left = _RECHECK_SECONDS
            if end is not None and (left := min(end - time.monotonic(), left)) <= 0:
                return False
            notified = threading.Lock()
            notified.acquire()
            try:
                _WAITING.append(notified)
                if not done():
                    notified.acquire(timeout=left)
            finally:
                with suppress(ValueError):
                    _WAITING.remove(notified)
        return True
    finally:
        if is_main:
            MainThread.awaited = None


def _notify() -> None:
    for lock in list(_WAITING):
        with suppress(RuntimeError):  # notified already
            lock.release()


@outside_graphs
class ShmWork(Work):
    """Handle of one operation."""

    # class attributes until they change: setting them takes as long as a small operation
    submitted = False
    _done = False
    _error: BaseException | None = None
    _future: torch.futures.Future[list[Tensor]] | None = None
    _source = -1
    # instead of the thread that calls `finish`: the links' thread would deadlock in a callback that
    # waits
    _callbacks_in_own_thread = False

    def __init__(self, tensors: Sequence[Tensor], default_timeout: float | None = None) -> None:
        Work.__init__(self)
        # value of the future
        self._tensors = list(tensors)
        # of `wait` without an argument, in seconds; None for no limit
        self._default_timeout = default_timeout

    def finish(self, error: BaseException | None = None, source: int = -1) -> None:
        """Mark the operation as done; `source` is the rank from which a tensor was received."""
        kept = None if error is None else without_frames(error)
        with _STATE:
            self._error, self._source, self._done = kept, source, True
            future = self._future
        try:
            _notify()
        finally:  # also if a signal handler raises: nothing else sets the future
            if future is not None and self._callbacks_in_own_thread:
                args = (self._tensors,)
                threading.Thread(target=future.set_result, args=args, daemon=True).start()
            elif future is not None:
                future.set_result(self._tensors)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait until the operation is done; a timeout of zero or less means the operation's own."""
        if not self._done:
            given = timeout.total_seconds()
            seconds = given if given > 0 else self._default_timeout
            if not self._wait(seconds):
                error = CollectiveTimeoutError(f"the operation is not done after {seconds:g} s")
                self._on_timeout(error)
                if not self._done:  # a receive may have been finished meanwhile
                    raise error
        if self._error is not None:
            raise without_frames(self._error)
        return True

    def _on_timeout(self, error: CollectiveTimeoutError) -> None:
        """Handle a timeout of `wait`, called with its error."""

    def _wait(self, seconds: float | None) -> bool:
        """Wait for some seconds; return False if the operation is not done."""
        return wait_until(self.is_done, seconds)

    def synchronize(self) -> None:
        """Wait until the operation is done."""
        self.wait()

    def is_done(self) -> bool:
        """Return True if the operation is known to be done, without polling for messages."""
        return self._done

    def is_completed(self) -> bool:
        """Return True if the operation is done, with or without an error."""
        return self._done

    def is_success(self) -> bool:
        """Return True if the operation is done without an error."""
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        """Return the error of the operation, if it failed."""
        return self._error

    def result(self) -> list[Tensor]:
        """Return the tensors of the operation."""
        return self._tensors

    def source_rank(self) -> int:
        """Return the rank from which a tensor was received."""
        return self._source

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """Return a future of the tensors."""
        with _STATE:
            if self._future is None:
                # set_exception would crash torch's C++ callers; raising in `then` does not
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
            raise without_frames(self._error)
        return future.value()


class _EndedWork(ShmWork):
    """Handle of an operation that has ended without an error; made in half the time."""

    _done = True
    __init__ = Work.__init__


def ended(tensors: Sequence[Tensor], source: int = -1) -> ShmWork:
    """Return the handle of an operation that has filled these tensors; see `ShmWork.finish`."""
    work: ShmWork = _EndedWork()
    work._tensors, work._source = list(tensors), source
    return work


def without_frames(error: BaseException) -> BaseException:
    """Return a copy of an error and of its causes, without tracebacks."""
    # An error that has been raised has a traceback, with the frames that it passed and so
    # everything that their callers hold: models, batches, the group itself. A group that kept one
    # would keep them for its lifetime and, as PyTorch's C++ refers to the group, for ever: no
    # garbage collector sees such a cycle. So groups keep copies, which are never raised themselves.
    kept = copied = _copy(error)
    seen = {id(error)}  # the chain of causes may be a cycle
    while (cause := error.__cause__) is not None and id(cause) not in seen:
        seen.add(id(cause))
        copied.__cause__ = _copy(cause)
        error, copied = cause, copied.__cause__
    return kept


def _copy(error: BaseException) -> BaseException:
    kind = type(error)
    with suppress(Exception):
        kept = copy.copy(error)
        if kept is not error and type(kept) is kind and kept.args == error.args:
            return _with_own_notes(kept)
    # copies call constructors, and one may take other arguments than its base class, or extend the
    # message: skip it
    base = next(each for each in kind.__mro__ if each.__module__ == "builtins")
    try:
        kept = kind.__new__(kind, *error.args)
        base.__init__(kept, *error.args)  # type: ignore[misc]
        vars(kept).update(vars(error))
    except Exception:
        return DistributedError(f"{kind.__name__}: {error}")
    return _with_own_notes(kept)


def _with_own_notes(kept: BaseException) -> BaseException:
    if hasattr(kept, "__notes__"):  # handlers may add notes to either error
        kept.__notes__ = list(kept.__notes__)
    return kept


Job = Callable[[], None]
_DESTROYED = "the group was destroyed on this rank: make a new one"


class Queue:
    """Run operations one at a time, in call order."""

    def __init__(self, name: str) -> None:
        # held by the thread that runs an operation; an RLock: no other thread can release it
        self._running = threading.RLock()
        # an RLock: a signal handler may submit in the thread that holds it
        self._order = threading.RLock()
        # two counts, each written by one side: the thread must not need a lock that a caller may
        # hold while its signal handler waits for an operation
        self._submitted = self._ended = 0
        self._jobs: SimpleQueue[tuple[Job, ShmWork] | None] = SimpleQueue()
        self._inline_in = 0  # identifier of the thread that runs its own operation; 0: none
        self._closed = False
        self._current: ShmWork | None = None  # handle of the job that the thread runs
        # started here, not at the first job: if a signal handler raises amid `Thread.start`, it is
        # unknown whether the thread runs
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        self._thread_id = self._thread.ident

    # A caller that waits for its operation runs it itself, between `enter` and `leave`, if no other
    # is pending; that saves two thread switches. All others run in the queue's thread.
    def enter(self) -> bool:
        """Let this thread run an operation; return False if another one is pending."""
        with self._order:
            if self._closed or self._inline_in:
                self._check_open()
                return False
            if self._submitted != self._ended or self._is_threads():
                return False  # an operation is pending
            self._enter()
        return True

    def leave(self) -> None:
        """End the operation for which this thread has entered, if it has."""
        if self._inline_in == threading.get_ident():
            try:  # noqa: SIM105 - suppress() takes as long as the lock
                self._running.release()  # before `_inline_in` is reset, as in `_enter`
            except RuntimeError:
                # this thread does not hold it: a signal handler raised amid `_enter`, before it was
                # acquired, or amid this, after it was released
                pass
            self._inline_in = 0

    def _enter(self) -> None:
        # before the lock is acquired: a signal handler between the two must be refused, or it
        # would wait for its own thread
        self._inline_in = threading.get_ident()
        self._running.acquire()
        if self._closed:  # by a signal handler since the check
            self.leave()
            self._check_open()

    def submit(self, job: Job, work: ShmWork) -> ShmWork:
        """Run a job in the thread after those submitted before."""
        with self._order:
            self._check_open()
            self._submitted += 1
            work.submitted = True  # before `put`, which an exception may interrupt after it is done
            self._jobs.put((job, work))
        # a future's callback in the thread may wait for the job, and no other thread runs it
        if self._is_threads():
            self._run(work)
        return work

    def _check_open(self) -> None:
        self.check_not_inside()
        if self._closed:
            raise BrokenGroupError(_DESTROYED)

    def check_not_inside(self) -> None:
        """Raise in a signal handler that has interrupted a job of this thread."""
        if self._inline_in and self.runs_in_this_thread():
            raise NotSupportedError(
                "this thread is in another operation of the group, which a signal interrupted: let "
                "the signal's handler set a flag, and call the operation after the interrupted one"
            )

    def is_awaited(self) -> bool:
        """Return True if the main thread only waits for the job that the thread runs."""
        work = self._current
        return work is not None and MainThread.awaited == work.is_done

    def _is_threads(self) -> bool:
        return threading.get_ident() == self._thread_id

    def runs_in_this_thread(self) -> bool:
        """Return True if a signal handler or finalizer calls this amid a job of its thread."""
        return self._inline_in == threading.get_ident()

    def close(self) -> None:
        """Refuse new jobs, wait for submitted ones, and end the thread; not from within a job."""
        with self._order:
            self._closed = True
        with self._running:
            pass  # an operation in a caller's thread has ended
        self._jobs.put(None)
        if not self._is_threads():
            self._thread.join()

    def _run(self, until: ShmWork | None = None) -> None:
        """Run submitted jobs up to and including `until`; until `close` if that is None."""
        while until is None or not until.is_done():
            item = self._jobs.get()
            if item is None:
                self._jobs.put(None)  # for a `_run` further up this thread's stack
                return
            job, work = item
            error: BaseException | None = None
            with self._running:
                self._current = work
                try:
                    job()
                except BaseException as raised:
                    error = raised
                self._current = None
                self._ended += 1
            # before `finish`: a waiting caller counts the uses of its tensors' memory
            del item, job
            work.finish(error)
            del work, error  # keep no tensors alive while waiting for the next job


class ThreadQueue(Queue):
    """Queue that runs all operations in its thread: signals do not end the engine's waits."""

    def enter(self) -> bool:
        """Return False: no operation runs in the caller's thread."""
        return False
