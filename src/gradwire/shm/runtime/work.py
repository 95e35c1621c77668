"""Handles of operations, and copies of their errors."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta

import torch
from torch import Tensor
from torch.distributed import Work

from gradwire._torch import outside_graphs
from gradwire.errors import CollectiveTimeoutError, DistributedError
from gradwire.shm.runtime.sync import main_thread_waits

_STATE = threading.RLock()
"""Lock held while an operation is marked as done; shared, as making one takes longer than a small
operation."""
_WAITING: list[threading.Lock] = []
"""Lock of each thread that waits for any operation, released when one is done. Not a condition: a
signal handler's exception can leave its lock held for ever."""
_RECHECK_SECONDS = 0.5  # a wait checks again: an exception may have interrupted `_notify`


def wait_until(done: Callable[[], bool], seconds: float | None) -> bool:
    """Wait for a condition that the end of an operation makes true; return False on timeout."""
    if threading.current_thread() is not threading.main_thread():
        return _wait_until(done, seconds)
    with main_thread_waits(done):
        return _wait_until(done, seconds)


def _wait_until(done: Callable[[], bool], seconds: float | None) -> bool:
    end = None if seconds is None else time.monotonic() + seconds
    while not done():
        left = _RECHECK_SECONDS if end is None else min(end - time.monotonic(), _RECHECK_SECONDS)
        if left <= 0:
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


def _notify() -> None:
    for lock in list(_WAITING):
        with suppress(RuntimeError):  # notified already
            lock.release()


@outside_graphs
class ShmWork(Work):
    """Handle of one operation.

    Args:
        tensors: Value of the future.
        default_timeout: Timeout of `wait` without an argument, in seconds; None for no limit.
        callbacks_in_own_thread: True to run the future's callbacks in a separate thread instead of
            the one that calls `finish`. The links' thread would deadlock in a callback that waits.

    Attributes:
        submitted: True if the operation was passed to a thread.
    """

    # class attributes until they change: setting them takes as long as a small operation
    submitted = False
    _done = False
    _error: BaseException | None = None
    _future: torch.futures.Future[list[Tensor]] | None = None
    _source = -1
    _callbacks_in_own_thread = False

    def __init__(
        self,
        tensors: Sequence[Tensor],
        default_timeout: float | None = None,
        *,
        callbacks_in_own_thread: bool = False,
    ) -> None:
        Work.__init__(self)
        self._tensors = list(tensors)
        self._default_timeout = default_timeout
        self._callbacks_in_own_thread = callbacks_in_own_thread

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

    def wait_until_done(self) -> None:
        """Wait without a limit, for operations that no longer depend on other ranks."""
        self._wait(None)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait until the operation is done; a timeout of zero or less means the operation's own.

        Raises:
            CollectiveTimeoutError: The operation is not done in time.
            DistributedError: The operation failed.
        """
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
    """Return a copy of an error and of its causes, without tracebacks.

    An error that has been raised has a traceback, with the frames that it passed and so everything
    that their callers hold: models, batches, the group itself. A group that kept one would keep
    them for its lifetime and, as PyTorch's C++ refers to the group, for ever: no garbage collector
    sees such a cycle. So groups keep copies, which are never raised themselves.

    Args:
        error: Error of any type. One that cannot be copied, for example from a signal handler of
            the caller, becomes a DistributedError that names it.
    """
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
