"""One `run_ranks` call, from sending the tasks until all workers are idle again, and its error.

A rank is running, has returned (and keeps its group, which other ranks may still need), is leaving
its group, or is done: its worker is idle or dead. When all have returned, or one has failed, those
that returned are released.
"""

from __future__ import annotations

import contextlib
import enum
import pickle
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from multiprocessing.connection import wait
from typing import Any, TypeAlias

from gradwire.errors import CollectiveTimeoutError, DistributedError, PeerLostError
from gradwire.testing.channel import Idle, Message, Raised, Release, Returned, Task
from gradwire.testing.pool import Worker, dump_stacks


class RankError(DistributedError):
    """One or more ranks of a `run_ranks` call raised an exception or died.

    The message has each failed rank's traceback; `__cause__` is the first rank's exception.

    Attributes:
        failures: The exception of each failed rank, in the order in which they failed: a
            `DistributedError` that describes it if it cannot be unpickled here, and a
            `PeerLostError` if the rank died.

    Example:
        >>> try:
        ...     run_ranks(lambda: 1 // dist.get_rank(), world_size=2)  # rank 0 divides by zero
        ... except RankError as error:
        ...     print(error.failures)
        {0: ZeroDivisionError(...)}
    """

    def __init__(self, message: str, failures: Mapping[int, BaseException] | None = None) -> None:
        super().__init__(message)
        self.failures = dict(failures or {})


def describe(headline: str, sections: Mapping[str, str]) -> str:
    """Return a message: a headline, then a titled section for each rank."""
    parts = [headline]
    parts += [f"--- {title} ---\n{text}".rstrip() for title, text in sections.items()]
    return "\n\n".join(parts)


FAILURE_SECONDS = 5.0
"""Time limit for ranks to end after another rank failed."""

LEAVE_SECONDS = 15.0
"""Time limit for ranks to leave their group: each collects garbage, which takes long on a busy
machine and after torch.compile."""

POLL_SECONDS = 0.2
"""Polling interval of the processes: a dead one's socket stays open as long as a child of its own
holds it."""

LOG_TAIL = 16000
"""Number of characters that are quoted from the end of a dead rank's stderr."""


class _State(enum.Enum):
    RUNNING = enum.auto()
    RETURNED = enum.auto()
    LEAVING = enum.auto()
    DONE = enum.auto()


class _Died:
    """In place of a message: the worker's process has ended."""


_Event: TypeAlias = Message | _Died


class Run:
    """The parent's side of one call; worker i is rank i.

    Attributes:
        lost: After `run`, the workers that cannot be used again.
    """

    def __init__(self, workers: Sequence[Worker], may_die: Collection[int]) -> None:
        self.lost: set[Worker] = set()
        self._workers = workers
        self._may_die = may_die
        self._states = [_State.RUNNING] * len(workers)
        self._results: dict[int, bytes] = {}
        self._failures: dict[int, Raised | _Died] = {}
        self._limit = 0.0
        self._ending = False

    def run(self, tasks: Sequence[Task], store: int, timeout: float) -> list[Any]:
        """Run the tasks to their end and return the ranks' results, or raise what went wrong.

        `store` is the descriptor of an empty file, for the ranks' FileStore.
        """
        self._limit = time.monotonic() + timeout
        try:
            for rank, task in enumerate(tasks):
                self._send(rank, task, store)
            while self._not_done() and time.monotonic() < self._limit:
                self._step()
        except BaseException:  # Ctrl-C, or a test's time limit
            self.lost.update(self._workers)
            raise
        self.lost.update(self._workers[rank] for rank in self._not_done())
        try:
            self._raise_failures()
            self._raise_if_stuck(timeout)
        finally:
            self._relay_logs()
        return [self._result(rank) for rank in range(len(self._workers))]

    def _not_done(self) -> list[int]:
        """Return the ranks that are not done."""
        return [rank for rank, state in enumerate(self._states) if state is not _State.DONE]

    def _step(self) -> None:
        """Wait for events and handle them; release the ranks once all have ended or one failed."""
        for rank, event in self._events():
            self._handle(rank, event)
        if not self._ending and (self._failures or _State.RUNNING not in self._states):
            self._ending = True
            self._limit = time.monotonic() + (FAILURE_SECONDS if self._failures else LEAVE_SECONDS)
        if self._ending:
            for rank, state in enumerate(self._states):
                if state is _State.RETURNED:
                    self._states[rank] = _State.LEAVING
                    self._send(rank, Release())

    def _send(self, rank: int, message: Message, descriptor: int | None = None) -> None:
        channel = self._workers[rank].channel
        # a worker that has ended is found by reading, one that does not read by the time limit
        with contextlib.suppress(EOFError, TimeoutError):
            channel.send(message, self._limit)
            if descriptor is not None:
                channel.send_descriptor(descriptor, self._limit)

    def _events(self) -> list[tuple[int, _Event]]:
        """Return the ranks' messages, deaths first: they are the cause of other ranks' errors."""
        active = {self._workers[rank].channel.fileno(): rank for rank in self._not_done()}
        timeout = max(0.0, min(POLL_SECONDS, self._limit - time.monotonic()))
        ready = wait(active, timeout)
        if time.monotonic() >= self._limit:
            return []  # too late: a message must not hide the hang
        events: list[tuple[int, _Event]] = []
        for descriptor, rank in active.items():
            worker = self._workers[rank]
            if descriptor in ready:
                try:
                    events.append((rank, worker.channel.receive(self._limit)))
                except EOFError:
                    events.append((rank, _Died()))
                except TimeoutError:
                    continue  # the worker stopped within a message: the time limit ends the call
            elif worker.process.poll() is not None and not wait([descriptor], 0):
                events.append((rank, _Died()))
        return sorted(events, key=lambda event: not isinstance(event[1], _Died))

    def _handle(self, rank: int, event: _Event) -> None:
        if isinstance(event, _Died):
            self._states[rank] = _State.DONE
            self.lost.add(self._workers[rank])
            if rank not in self._may_die:
                self._failures.setdefault(rank, event)
        elif isinstance(event, Raised):
            self._states[rank] = _State.LEAVING
            self._failures.setdefault(rank, event)
        elif isinstance(event, Returned):
            self._states[rank] = _State.RETURNED
            self._results[rank] = event.result
        else:
            assert isinstance(event, Idle)
            self._states[rank] = _State.DONE

    def _raise_failures(self) -> None:
        if not self._failures:
            return
        exceptions: dict[int, BaseException] = {}
        summaries: list[str] = []
        sections: dict[str, str] = {}
        for rank, failure in self._failures.items():
            if isinstance(failure, _Died):
                worker = self._workers[rank]
                summary = worker.exit_text()
                sections[f"rank {rank} {summary}"] = worker.new_log()[-LOG_TAIL:]
                exceptions[rank] = PeerLostError(f"rank {rank} {summary}")
            else:
                summary = failure.summary
                sections[f"rank {rank}"] = failure.traceback
                exceptions[rank] = _loaded(failure)
            summaries.append(summary)
        first = next(iter(exceptions))
        also = f" (rank {first} first)" if len(exceptions) > 1 else ""
        headline = (
            f"fn failed on {_ranks(exceptions)} of {len(self._workers)}{also}: {summaries[0]}"
        )
        sections.update(self._stacks(f"was killed {FAILURE_SECONDS:g} s after that; it was at"))
        raise RankError(describe(headline, sections), exceptions) from exceptions[first]

    def _raise_if_stuck(self, timeout: float) -> None:
        if not self._not_done():
            return
        if self._ending:
            headline = (
                f"fn returned, but {_ranks(self._not_done())} of {len(self._workers)} did not "
            )
            headline += f"leave the process group within {LEAVE_SECONDS:g} s"
        else:
            running = [r for r, state in enumerate(self._states) if state is _State.RUNNING]
            headline = f"fn did not return within timeout={timeout:g} s on {_ranks(running)} "
            headline += f"of {len(self._workers)}"
        raise CollectiveTimeoutError(describe(headline, self._stacks("was killed; it was at")))

    def _stacks(self, fate: str) -> dict[str, str]:
        """Return a section for each rank that has to be killed."""
        stuck = [r for r in self._not_done() if self._states[r] is not _State.RETURNED]
        dumps = dump_stacks([self._workers[rank] for rank in stuck])
        return {f"rank {rank} {fate}": dump for rank, dump in zip(stuck, dumps, strict=True)}

    def _result(self, rank: int) -> Any:
        data = self._results.get(rank)
        if data is None:  # it was allowed to die
            return None
        try:
            return pickle.loads(data)
        except Exception as error:
            raise DistributedError(
                f"the result of rank {rank} cannot be unpickled here: {error!r}"
            ) from error

    def _relay_logs(self) -> None:
        for rank, worker in enumerate(self._workers):
            for line in worker.new_log().splitlines():
                print(f"[rank {rank}] {line}", file=sys.stderr)


def _loaded(failure: Raised) -> BaseException:
    with contextlib.suppress(Exception):  # cannot be unpickled here: the summary serves
        exception = pickle.loads(failure.exception or b"")
        if isinstance(exception, BaseException):
            return exception
    return DistributedError(failure.summary)


def _ranks(ranks: Collection[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
