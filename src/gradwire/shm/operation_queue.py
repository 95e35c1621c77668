"""The queue of a group's operations: in the order of the calls, by the caller or by a thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

from gradwire.errors import BrokenGroupError, NotSupportedError
from gradwire.shm.sync import main_thread_awaits
from gradwire.shm.work import ShmWork

Job = Callable[[], None]
_DESTROYED = "the group was destroyed on this rank: make a new one"


class Queue:
    """Runs operations one at a time, in the order of the calls.

    An operation whose caller waits is run by the caller, between `enter` and `leave`, if none is
    before it, which saves two switches of threads; all others run in a thread.
    """

    def __init__(self, name: str) -> None:
        # held by the thread that runs an operation; reentrant: no other thread can release it
        self._running = threading.RLock()
        # reentrant: a signal handler may submit in the thread that holds it
        self._order = threading.RLock()
        # two counts, each written to by one side: the thread needs no lock that a caller may hold,
        # whose signal handler waits for an operation
        self._submitted = self._ended = 0
        self._jobs: SimpleQueue[tuple[Job, ShmWork] | None] = SimpleQueue()
        self._inline_in = 0  # the thread that runs an operation it submitted; 0 for none
        self._closed = False
        self._current: ShmWork | None = None  # of the job that the thread runs
        # not only for the first job: an exception of a signal's handler amid `Thread.start` leaves
        # open whether the thread runs
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        self._thread_id = self._thread.ident

    def enter(self) -> bool:
        """Let this thread run an operation, if nothing is before it; whether it may.

        Raises:
            BrokenGroupError, NotSupportedError: As of `submit`.
        """
        with self._order:
            if not self._is_free():
                return False
            self._enter()
        return True

    def leave(self) -> None:
        """The operation that this thread has entered for, if it has, is over."""
        if self._inline_in == threading.get_ident():
            try:  # noqa: SIM105 - suppress() takes as long as the lock
                self._running.release()  # before `_inline_in` is reset, as in `_enter`
            except RuntimeError:
                # this thread does not hold it: a signal's handler has raised amid `_enter`, before
                # it was acquired, or amid this, after it was released: nothing to give back
                pass
            self._inline_in = 0

    def _enter(self) -> None:
        # before the lock is acquired: a signal handler that runs between the two would wait for
        # its own thread if it were not refused
        self._inline_in = threading.get_ident()
        self._running.acquire()
        if self._closed:  # by a signal handler, until a line ago
            self.leave()
            self._check_open()

    def _is_free(self) -> bool:
        """Whether no operation is before another one; with the lock held."""
        if self._closed or self._inline_in:
            self._check_open()
            return False
        return self._submitted == self._ended and not self._is_threads()

    def submit(self, job: Job, work: ShmWork) -> ShmWork:
        """Run a job in its turn.

        Raises:
            BrokenGroupError: The queue was closed.
            NotSupportedError: This thread is in a job already, which a signal interrupted.
        """
        with self._order:
            self._check_open()
            self._submitted += 1
            work.submitted = True  # first: what an exception interrupts may have been put there
            self._jobs.put((job, work))
        self.run_in_thread(until=work)
        return work

    def run_in_thread(self, until: ShmWork) -> None:
        """In a future's callback, which the thread has called: run what is pending here.

        The callback may wait for it, and no other thread runs it.
        """
        if self._is_threads():
            self._run(until)

    def _check_open(self) -> None:
        self.check_not_inside()
        if self._closed:
            raise BrokenGroupError(_DESTROYED)

    def check_not_inside(self) -> None:
        """Refuse what a signal handler calls that has interrupted a job of this thread.

        Raises:
            NotSupportedError: This thread is in a job.
        """
        if self._inline_in and self.runs_in_this_thread():
            raise NotSupportedError(
                "this thread is in another operation of the group, which a signal interrupted: let "
                "the signal's handler set a flag, and call the operation after the interrupted one"
            )

    def is_awaited(self) -> bool:
        """Whether the main thread does nothing but wait for the job that the thread runs."""
        work = self._current
        return work is not None and main_thread_awaits(work.is_done)

    def _is_threads(self) -> bool:
        return threading.get_ident() == self._thread_id

    def runs_in_this_thread(self) -> bool:
        """Whether this thread runs a job, which a signal handler or a finalizer has interrupted."""
        return self._inline_in == threading.get_ident()

    def close(self) -> None:
        """Refuse new jobs, let the submitted ones end, then the thread; not from within a job."""
        with self._order:
            self._closed = True
        with self._running:
            pass  # wait for an operation that runs in a caller's thread
        self._jobs.put(None)
        if not self._is_threads():
            self._thread.join()

    def _run(self, until: ShmWork | None = None) -> None:
        """Run submitted jobs up to and including `until`; if that is None, until `close`."""
        while until is None or not until.is_done():
            item = self._jobs.get()
            if item is None:
                self._jobs.put(None)  # for the `_run` further up this thread's stack
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
            del item, job  # first: who has waited counts the uses of the tensors' memory
            work.finish(error)
            del work, error  # keep no tensors alive while waiting for the next job
