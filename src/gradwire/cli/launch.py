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
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from gradwire._processes import kill_all, spawn
from gradwire.errors import ArgumentError

_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_EXIT_SECONDS = 1.0  # time limit for the exit of a rank that reported an error


@dataclass(frozen=True)
class RankEnv:
    """Rank of a job.

    Args:
        rank: Rank among all processes.
        world_size: Number of processes.
        local_rank: Rank on this host.
        local_size: Number of processes on this host.
        store_port: Port of the launcher's store on this host; None under torchrun, whose
            environment variables contain the address.
    """

    rank: int
    world_size: int
    local_rank: int
    local_size: int
    store_port: int | None = None

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> RankEnv | None:
        """Return torchrun's environment of this process; None if no launcher started it.

        Raises:
            ArgumentError: RANK is set, but another variable of torchrun is missing or not a number.
        """
        if "RANK" not in environment:
            return None
        missing = [name for name in _TORCHRUN if name not in environment]
        if missing:
            raise ArgumentError(
                f"RANK={environment['RANK']} is set without {', '.join(missing)}: start with "
                "torchrun, or unset RANK"
            )
        try:
            return cls(*(int(environment[name]) for name in _TORCHRUN[:4]))
        except ValueError as error:
            raise ArgumentError(
                f"{', '.join(_TORCHRUN[:4])} must be whole numbers ({error}): start with "
                "torchrun, or unset RANK"
            ) from error

    def device(self, backend: str) -> torch.device:
        """Return the device of this rank's tensors on `backend`: the CPU, or the rank's GPU."""
        supported = dist.Backend.backend_capability.get(backend, ["cpu"])
        if "cpu" in supported:
            return torch.device("cpu")
        return torch.device(supported[0], self.local_rank)


def join_group(env: RankEnv, backend: str, timeout: timedelta) -> dist.ProcessGroup:
    """Initialize the default process group and return it."""
    store = None
    if env.store_port is not None:
        store = dist.TCPStore("127.0.0.1", env.store_port, is_master=False, timeout=timeout)
    device = env.device(backend)
    dist.init_process_group(
        backend,
        store=store,
        rank=env.rank,
        world_size=env.world_size,
        timeout=timeout,
        device_id=device if device.type != "cpu" else None,
    )
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def exit_rank(exitcode: int) -> NoReturn:
    """Exit a rank's process without finalizing the interpreter.

    torch's DistributedDataParallel keeps the group's threads alive after destroy_process_group. A
    thread that frees a tensor after finalization aborts the process.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exitcode)


Send = Callable[[Any], None]
Job = Callable[[RankEnv, Send], None]


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
