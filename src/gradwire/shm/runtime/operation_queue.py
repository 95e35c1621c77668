"""Queue of a group's operations, which run in call order, in the caller or in a thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

from gradwire.errors import BrokenGroupError, NotSupportedError
from gradwire.shm.runtime.sync import main_thread_awaits
from gradwire.shm.runtime.work import ShmWork

Job = Callable[[], None]
_DESTROYED = "the group was destroyed on this rank: make a new one"


class Queue:
    """Run operations one at a time, in call order.

    A caller that waits for its operation runs it itself, between `enter` and `leave`, if no other
    is pending; that saves two thread switches. All others run in the queue's thread.
    """

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

    def enter(self) -> bool:
        """Let this thread run an operation; return False if another one is pending.

        Raises:
            BrokenGroupError, NotSupportedError: See `submit`.
        """
        with self._order:
            if not self._is_free():
                return False
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

    def _is_free(self) -> bool:
        """Return True if no operation is pending; call it with the lock held."""
        if self._closed or self._inline_in:
            self._check_open()
            return False
        return self._submitted == self._ended and not self._is_threads()

    def submit(self, job: Job, work: ShmWork) -> ShmWork:
        """Run a job in the thread after those submitted before.

        Raises:
            BrokenGroupError: The queue was closed.
            NotSupportedError: A signal handler called this amid a job of this thread.
        """
        with self._order:
            self._check_open()
            self._submitted += 1
            work.submitted = True  # before `put`, which an exception may interrupt after it is done
            self._jobs.put((job, work))
        self.run_in_thread(until=work)
        return work

    def run_in_thread(self, until: ShmWork) -> None:
        """Run pending jobs, if called by a future's callback in the queue's thread.

        The callback may wait for them, and no other thread runs them.
        """
        if self._is_threads():
            self._run(until)

    def _check_open(self) -> None:
        self.check_not_inside()
        if self._closed:
            raise BrokenGroupError(_DESTROYED)

    def check_not_inside(self) -> None:
        """Raise in a signal handler that has interrupted a job of this thread.

        Raises:
            NotSupportedError: This thread is running a job.
        """
        if self._inline_in and self.runs_in_this_thread():
            raise NotSupportedError(
                "this thread is in another operation of the group, which a signal interrupted: let "
                "the signal's handler set a flag, and call the operation after the interrupted one"
            )

    def is_awaited(self) -> bool:
        """Return True if the main thread only waits for the job that the thread runs."""
        work = self._current
        return work is not None and main_thread_awaits(work.is_done)

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
