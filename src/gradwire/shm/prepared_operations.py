"""A group's operations that are prepared once, and run again and again by `start` and `finish`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from gradwire.errors import BrokenGroupError, MismatchError
from gradwire.recorder import failed
from gradwire.shm.operation_queue import Job, Prepared, Stage
from gradwire.shm.submission import Submission, in_inference_mode
from gradwire.shm.work import ShmWork

__all__ = ["PreparedOperations"]


class PreparedOperations(Submission):
    """The part of a group that runs operations which are prepared."""

    def prepare(
        self, job: Job, tensors: Sequence[Tensor], halves: tuple[Job, Job] | None, op: int
    ) -> Prepared:
        """Prepare an operation that `start` and `finish` run again and again.

        Args:
            job: What it does.
            tensors: What it fills.
            halves: The same in two, of which `start` runs the first, which waits for nobody, and
                `finish` the second; if there are none, a thread runs it.
            op: Number of the reduce op.
        """
        if any(map(Tensor.is_inference, tensors)):
            job = partial(in_inference_mode, job)
            halves = halves and (halves[0], partial(in_inference_mode, halves[1]))
        return Prepared(job, tensors, halves, self._run_prepared, self._break, self._state, op)

    def is_current(self, prepared: Prepared) -> bool:
        """Whether the group has not been formed again since an operation was prepared."""
        return prepared.state is self._state

    def _run_prepared(self, prepared: Prepared) -> None:
        self._run_queued(partial(self._run_left, prepared), 0, self._seconds, prepared.entry)

    def _run_left(self, prepared: Prepared) -> None:
        assert prepared.left is not None
        try:
            prepared.left()
        except MismatchError as error:
            if self._state.is_agreed(error):
                prepared.stage = Stage.REFUSED
            raise
        prepared.stage = Stage.ENDED

    def start(self, prepared: Prepared) -> None:
        """Begin a prepared operation that is idle; from then on, other ranks can end theirs.

        After an exception, its stage says whether it was begun.
        """
        if self._closed or self._broken is not None:
            self.check_usable()
        self._submitted += 1
        prepared.entry = self._record_again(prepared, prepared.tensors, "a prepared all_reduce")
        if self.observer is not None:
            self.observer("allreduce_", 0, prepared.op, [prepared.tensors])
        prepared.work, halves = None, prepared.halves
        if halves is not None:
            prepared.left = halves[1]  # before `hold`: from then on, the thread may run it
            try:
                if self._queue.hold(prepared, halves[0]):
                    return
            except BaseException as error:
                if self._broken is not None:  # since the check above
                    failed(error, prepared.entry)
                raise
            finally:
                if self._leaving:
                    self._release_if_left()
        prepared.left, prepared.work = prepared.job, ShmWork(prepared.tensors)
        self._submit_prepared(prepared, prepared.work)

    def _submit_prepared(self, prepared: Prepared, work: ShmWork) -> None:
        prepared.stage = Stage.BEGUN  # first: the thread may end it at once
        try:
            self._queue.submit(partial(self._run_prepared, prepared), work)
        except BaseException as error:
            if not work.submitted:
                prepared.stage = Stage.IDLE
            elif prepared.stage is Stage.BEGUN:  # a signal's handler has raised: the thread has it,
                self._break(error)  # or not
                work.finish(error)
            raise

    def finish(self, prepared: Prepared) -> None:
        """Wait for a prepared operation that was begun to end; can be called again.

        Raises:
            DistributedError: The operation failed.
        """
        self._queue.check_not_inside()
        if prepared.stage is Stage.ENDED:
            return
        if self._closed and not (prepared.work is not None and prepared.work.is_done()):
            self.check_usable()  # raises; also in a forked process
        take, left = partial(self._queue.take, prepared), partial(self._run_left, prepared)
        try:
            if self._run_at_once(take, left, 0, self._seconds, prepared.entry):
                return
        except BaseException as error:
            # where it was taken and not run, the posts of the other ranks would be taken for those
            # of the next collective
            if prepared.stage is Stage.BEGUN and not (self._closed or self._queue.has(prepared)):
                self._break(error)
            raise
        if prepared.work is None:  # of an operation that failed before: raises
            self.check_usable()
            raise BrokenGroupError("the operation has failed")
        try:
            self._queue.run_in_thread(until=prepared.work)
            prepared.work.wait()
        finally:
            self._release_if_left()
