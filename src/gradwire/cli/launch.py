"""Launcher of the command and of the benchmarks: one job in several processes of this host.

The parent serves the ranks' store (on its own port of the loopback interface), receives their
messages, and kills all ranks when one fails. No rank outlives it. `gradwire.testing.run_ranks` is
separate because it reuses its processes between calls.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any

import torch.distributed as dist

from gradwire._processes import kill_all, spawn
from gradwire.cli.rank_env import RankEnv, exit_rank

Send = Callable[[Any], None]
Job = Callable[[RankEnv, Send], None]

_EXIT_SECONDS = 1.0  # time limit for the exit of a rank that reported an error


class RankFailure(Exception):
    """Raised when a rank failed or died, after the others were killed.

    Args:
        rank: Rank that failed first.
        reason: Description of its error, or of the end of its process.
        details: Traceback; "" if it died.
    """

    def __init__(self, rank: int, reason: str, details: str) -> None:
        super().__init__(rank, reason, details)
        self.rank = rank
        self.reason = reason
        self.details = details

    def __str__(self) -> str:
        return f"rank {self.rank} {self.reason}"

    @classmethod
    def of(cls, rank: int, error: Exception) -> RankFailure:
        """Create the failure of a rank that raised `error`; call it in the `except` block."""
        return cls(rank, f"failed: {type(error).__name__}: {error}", traceback.format_exc())


@dataclass(frozen=True)
class _Raised:
    """Last message of a rank that raised."""

    when: float
    failure: RankFailure


@dataclass
class _Rank:
    """Parent's side of one rank's process."""

    number: int
    process: multiprocessing.process.BaseProcess
    inbox: Connection
    raised: _Raised | None = None

    def read(self, receive: Send) -> None:
        """Receive all pending messages of the rank."""
        while not self.inbox.closed and self.inbox.poll():
            try:
                message = self.inbox.recv()
            except (EOFError, OSError):  # OSError: it died within a message
                self.inbox.close()
            else:
                if isinstance(message, _Raised):
                    self.raised = message
                else:
                    receive(message)

    @property
    def died(self) -> bool:
        """True if the process ended with an error that it did not report."""
        return self.raised is None and self.process.exitcode not in (None, 0)


def launch(job: Job, nproc: int, receive: Send) -> None:
    """Run `job(env, send)` in `nproc` new processes and wait for all of them.

    Args:
        job: Function to call in each process; it is pickled, so it must be importable by name.
        nproc: Number of processes.
        receive: Function called in this process with each object that a rank passes to `send`.

    Raises:
        RankFailure: A rank raised or died. No process is left after any error.
    """
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    store = dist.TCPStore(
        "127.0.0.1",
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    ranks: list[_Rank] = []
    try:
        with _interrupts_held():
            for number in range(nproc):
                env = RankEnv(number, nproc, number, nproc, port)
                ranks.append(_Rank(number, *spawn(_run, job, env)))
        _watch(ranks, receive)
    finally:
        kill_all([rank.process for rank in ranks])
        del store  # last, since living ranks may be using it


def _run(job: Job, env: RankEnv, outbox: Connection) -> None:
    """Run a rank and end its process."""
    if "lo" in (name for _, name in socket.if_nameindex()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # else Gloo resolves the host's name
    try:
        job(env, outbox.send)
    except Exception as error:
        outbox.send(_Raised(time.monotonic(), RankFailure.of(env.rank, error)))
        exit_rank(1)
    exit_rank(0)


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Block SIGINT, also in processes started meanwhile: the parent ends them."""
    resource_tracker.ensure_running()  # else the first start does it and unblocks SIGINT
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _watch(ranks: list[_Rank], receive: Send) -> None:
    """Receive messages until all ranks have ended; raise when one fails."""
    while True:
        running = [rank for rank in ranks if rank.process.exitcode is None]
        for rank in ranks:
            rank.read(receive)
        if any(rank.raised or rank.died for rank in ranks):
            raise _first_failure(ranks)
        if not running:
            return
        wait(_wait_handles(running))


def _wait_handles(ranks: list[_Rank]) -> list[Any]:
    inboxes = [rank.inbox for rank in ranks if not rank.inbox.closed]
    return [*inboxes, *(rank.process.sentinel for rank in ranks)]


def _first_failure(ranks: list[_Rank]) -> RankFailure:
    """Return the failure that caused the others.

    When a rank dies, the resulting errors of other ranks may arrive before its death is noticed. So
    ranks that reported an error get a second to end. Then a death takes precedence over errors, and
    an earlier error over a later one.
    """
    deadline = time.monotonic() + _EXIT_SECONDS
    for rank in ranks:
        rank.process.join(max(0.0, deadline - time.monotonic()))
        rank.read(lambda message: None)
    for rank in ranks:
        if rank.died:
            return RankFailure(rank.number, _exit_reason(rank.process.exitcode), "")
    reported = [rank.raised for rank in ranks if rank.raised]
    return min(reported, key=lambda raised: raised.when).failure


def _exit_reason(exitcode: int | None) -> str:
    if exitcode is not None and exitcode < 0:
        return f"was ended by {signal.Signals(-exitcode).name}"
    return f"ended with exit code {exitcode} before its work was done"
