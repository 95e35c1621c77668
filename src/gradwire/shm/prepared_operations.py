"""A group's operations that are prepared once, and run again and again by `start` and `finish`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from gradwire.errors import BrokenGroupError, MismatchError, NotSupportedError
from gradwire.recorder import failed
from gradwire.shm.operation_queue import Job, Prepared
from gradwire.shm.submission import Submission, in_inference_mode
from gradwire.shm.work import ShmWork

__all__ = ["PreparedOperations"]


class PreparedOperations(Submission):
    """The part of a group that runs operations which are prepared."""

    def prepare(
        self, job: Job, tensors: Sequence[Tensor], halves: tuple[Job, Job] | None
    ) -> Prepared:
        """Prepare an operation that `start` and `finish` run again and again.

        Args:
            job: What it does.
            tensors: What it fills.
            halves: The same in two, of which `start` runs the first, which waits for nobody, and
                `finish` the second; if there are none, a thread runs it.
        """
        if any(map(Tensor.is_inference, tensors)):
            job = partial(in_inference_mode, job)
            halves = halves and (halves[0], partial(in_inference_mode, halves[1]))
        return Prepared(job, tensors, halves, self._run_prepared, self._break)

    def _run_prepared(self, prepared: Prepared) -> None:
        assert prepared.left is not None
        self._run_queued(prepared.left, 0, self._seconds, prepared.entry)

    def start(self, prepared: Prepared) -> None:
        """Begin a prepared operation, which `finish` ends; other ranks can end theirs."""
        if self._closed or self._broken is not None:
            self._check_usable()
        self._submitted += 1
        prepared.entry = self._record_again(prepared, prepared.tensors, "a prepared all_reduce")
        if self.observer is not None:
            self.observer("allreduce_", 0, [prepared.tensors])
        prepared.work, halves = None, prepared.halves
        if halves is not None:
            prepared.left = halves[1]  # before `hold`: from then on, the thread may run it
            try:
                if self._queue.hold(prepared, halves[0]):
                    return
            except BaseException as error:
                if error is self._broken:
                    failed(error, prepared.entry)
                raise
            finally:
                if self._leaving:
                    self._release_if_left()
        prepared.left, work = prepared.job, ShmWork(prepared.tensors)
        prepared.work = self._queue.submit(partial(self._run_prepared, prepared), work)

    def finish(self, prepared: Prepared) -> None:
        """Wait for a prepared operation to end.

        Raises:
            DistributedError: The operation failed.
        """
        assert prepared.left is not None
        take = partial(self._queue.take, prepared)
        try:
            if self._run_at_once(take, prepared.left, 0, self._seconds, prepared.entry):
                return
        except (MismatchError, NotSupportedError):  # on all ranks; refused
            raise
        except BaseException as error:
            # where it was taken and not run, the posts of the other ranks would be taken for those
            # of the next collective
            if not (self._closed or self.is_under_way(prepared)):
                self._break(error)
            raise
        if prepared.work is None:
            raise BrokenGroupError("the group was destroyed before the operation was waited for")
        try:
            prepared.work.wait()
        finally:
            self._release_if_left()

    def is_under_way(self, prepared: Prepared) -> bool:
        """Whether a prepared operation was begun, and has not ended."""
        in_thread = prepared.work is not None and not prepared.work.is_done()
        return in_thread or self._queue.holds(prepared)
