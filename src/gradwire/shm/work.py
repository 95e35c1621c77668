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
from gradwire.shm.sync import main_thread_waits

_STATE = threading.RLock()
"""Held while an operation is marked as done; one for all, as making one takes longer than a small
operation."""
_WAITING: list[threading.Lock] = []
"""A lock for each thread that waits for any operation, which is released when one is done. A
condition would not do: an exception of a signal's handler can leave its lock held for ever."""
_MISSED_SECONDS = 0.5  # after which a wait looks again: an exception may have ended `_tell_waiting`


def wait_until(done: Callable[[], bool], seconds: float | None) -> bool:
    """Wait until something that an operation's end makes true is true; whether it is."""
    if threading.current_thread() is not threading.main_thread():
        return _wait_until(done, seconds)
    with main_thread_waits(done):
        return _wait_until(done, seconds)


def _wait_until(done: Callable[[], bool], seconds: float | None) -> bool:
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
        callbacks_in_own_thread: Whether its future's callbacks run in a thread of their own, and
            not in the one that calls `finish`. The links' thread would deadlock in a callback that
            waits.

    Attributes:
        submitted: Whether a thread is to run the operation.
    """

    # of the class until they change: setting them takes as long as a small operation
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
        """Mark it as done; `source` is the rank that a received tensor came from."""
        kept = None if error is None else without_frames(error)
        with _STATE:
            self._error, self._source, self._done = kept, source, True
            future = self._future
        try:
            _tell_waiting()
        finally:  # also after an exception of a signal's handler: nobody else sets it
            if future is not None and self._callbacks_in_own_thread:
                args = (self._tensors,)
                threading.Thread(target=future.set_result, args=args, daemon=True).start()
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
                error = CollectiveTimeoutError(f"the operation is not done after {seconds:g} s")
                self._give_up(error)
                if not self._done:  # a receive may have been finished meanwhile
                    raise error
        if self._error is not None:
            raise without_frames(self._error)
        return True

    def _give_up(self, error: CollectiveTimeoutError) -> None:
        """Called when `wait` times out, with its error."""

    def _wait(self, seconds: float | None) -> bool:
        """Wait for so long; whether it is done."""
        return wait_until(self.is_done, seconds)

    def synchronize(self) -> None:
        """As `wait`."""
        self.wait()

    def is_done(self) -> bool:
        """Whether it is done, as far as is known without looking for what has arrived."""
        return self._done

    def is_completed(self) -> bool:
        """Whether it is done, with or without an error."""
        return self._done

    def is_success(self) -> bool:
        """Whether it is done without an error."""
        return self.is_completed() and self._error is None

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
            raise without_frames(self._error)
        return future.value()


class _EndedWork(ShmWork):
    """The handle of an operation that has ended well; made in half the time."""

    _done = True
    __init__ = Work.__init__


def ended(tensors: Sequence[Tensor], source: int = -1) -> ShmWork:
    """The handle of an operation that has ended well and filled these tensors; see `finish`."""
    work: ShmWork = _EndedWork()
    work._tensors, work._source = list(tensors), source
    return work


def without_frames(error: BaseException) -> BaseException:
    """An error that says the same, with the causes of this one, and has not been raised.

    Args:
        error: Of any type. One of the caller's, as a signal's handler raises, may be such that it
            cannot be copied: it becomes a DistributedError that names it.
    """
    kept = copied = _copy(error)
    seen = {id(error)}  # an error may be raised from one that was raised from it
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
    # copies are made by constructors, and one may take other arguments than its base's, or put a
    # message around them: it is left out
    base = next(each for each in kind.__mro__ if each.__module__ == "builtins")
    try:
        kept = kind.__new__(kind, *error.args)
        base.__init__(kept, *error.args)  # type: ignore[misc]
        vars(kept).update(vars(error))
    except Exception:
        return DistributedError(f"{kind.__name__}: {error}")
    return _with_own_notes(kept)


def _with_own_notes(kept: BaseException) -> BaseException:
    if hasattr(kept, "__notes__"):  # who catches one may add to them
        kept.__notes__ = list(kept.__notes__)
    return kept
