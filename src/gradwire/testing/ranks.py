"""`run_ranks`: a function on several ranks from one line, in a test or an interactive session.

A rank runs, has returned (and keeps its group, which other ranks may still need), is leaving its
group, or is done: its worker is idle or dead. When all have returned, or one has failed, those that
returned are released.
"""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import secrets
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from multiprocessing.connection import wait
from typing import Any

import torch.distributed as dist

from gradwire.errors import (
    ArgumentError,
    ArgumentTypeError,
    CollectiveTimeoutError,
    DistributedError,
    NotSupportedError,
    PeerLostError,
)
from gradwire.testing.worker import (
    POOL,
    Pool,
    Task,
    Worker,
    dump_stacks,
    dumps,
    receive,
    send,
    worker_environment,
)

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


def run_ranks(
    fn: Callable[..., Any],
    world_size: int = 2,
    *,
    backend: str = "shm",
    timeout: float = 60.0,
    args: Sequence[Any] = (),
    may_die: Collection[int] = (),
    hosts: Sequence[int] | Pool = (),
) -> list[Any]:
    """Call `fn(*args)` on `world_size` ranks, each in its own process; return results by rank.

    In each process `torch.distributed` has a fresh default group with the given backend, which is
    destroyed when all ranks have returned. The processes are kept for the next call, with one
    thread for kernels, random numbers seeded with the rank, and the caller's environment,
    directory and `sys.path`; anything else that `fn` changes in its process stays changed.
    Arguments and results travel pickled: tensors are copies. What ranks write to stderr is
    printed here when the call ends. Warnings are as Python has them by default; filters that `fn`
    sets (`warnings.simplefilter("error")`) are undone after it.

    Args:
        fn: Any callable, lambdas and local functions included.
        world_size: The number of ranks, ≥ 1.
        backend: Any backend that torch.distributed knows, "gloo" and "cpu:gloo,cuda:nccl" included.
        timeout: Seconds that the call may take, > 0; the group's own timeout is longer. Starting
            processes, in the first call, is not counted.
        args: Positional arguments of `fn`.
        may_die: Ranks that may end their process; the result of one that does is None.
        hosts: Number of ranks on each host: in the default group, if it is on shm, ranks of
            different ones share no memory then, and send each other messages.

    Returns:
        What `fn` returned on rank 0, 1, ….

    Raises:
        RankError: `fn` raised on a rank, or a rank's process ended. Ranks that do not end within
            a few seconds of that are killed.
        CollectiveTimeoutError: The call took longer than `timeout`. The message shows the stack of
            every thread of every rank that was still running; these are killed.
        ArgumentError, ArgumentTypeError: An argument cannot be used, or cannot be pickled.
        NotSupportedError: cloudpickle is not installed.

    Example:
        >>> def total():
        ...     x = torch.tensor([dist.get_rank() + 1.0])  # rank 0: [1.], rank 1: [2.]
        ...     dist.all_reduce(x)  # both: [3.]
        ...     return x
        >>> run_ranks(total, world_size=2)
        [tensor([3.]), tensor([3.])]
    """
    _check(fn, world_size, backend, timeout, may_die)
    counts = hosts.ranks if isinstance(hosts, Pool) else hosts
    if counts and (min(counts) < 1 or sum(counts) != world_size):
        raise ArgumentError(
            f"hosts has {list(counts)} ranks: give one or more for each host, {world_size} in all"
        )
    names = [f"host {host}" for host, count in enumerate(counts) for _ in range(count)]
    environment, pool = worker_environment(), POOL
    if isinstance(hosts, Pool):  # of processes that are on different hosts
        pool, names = hosts, []
        environment["GLOO_SOCKET_IFNAME"] = hosts.interface
    try:
        call = dumps((fn, tuple(args)))
    except NotSupportedError:
        raise
    except Exception as error:
        raise ArgumentTypeError(
            f"fn and args must be picklable, to be sent to other processes: {error}"
        ) from error
    path, directory = tuple(sys.path), os.getcwd()
    with pool.lock:
        workers = pool.take(world_size)
        # a FileStore: a TCPStore resolves addresses, which takes seconds if the name server does
        # not answer, and other users can connect to it
        store = os.path.join(tempfile.gettempdir(), f"gradwire-store-{secrets.token_hex()}")
        task = Task(call, world_size, backend, timeout, store, environment, path, directory)
        try:
            return _Call(workers, may_die).run(task, names or [""] * world_size)
        finally:
            with contextlib.suppress(OSError):  # the last rank that joins removes it on Linux
                os.unlink(store)


def _check(
    fn: object, world_size: Any, backend: Any, timeout: Any, may_die: Collection[int]
) -> None:
    known = ", ".join(name for name in dist.Backend.backend_list if name != "undefined")

    def available(backend: str) -> bool:
        parts = [part.rpartition(":")[2] for part in backend.split(",")]
        return all(map(dist.is_backend_available, parts))

    accepted: list[tuple[str, Any, Any, Callable[[Any], bool], str]] = [
        ("fn", fn, Callable, callable, "callable"),
        ("world_size", world_size, int, lambda size: size >= 1, "an int of at least 1"),
        ("timeout", timeout, (int, float), lambda s: 0 < s < math.inf, "a number of seconds > 0"),
        ("backend", backend, str, available, f"a str that names backends of this torch ({known})"),
    ]
    for name, value, kind, fits, what in accepted:
        if not isinstance(value, kind):
            raise ArgumentTypeError(f"{name} must be {what}, but is a {type(value).__name__}")
        if not fits(value):
            raise ArgumentError(f"{name} must be {what}, but is {value!r}")
    outside = [rank for rank in may_die if rank not in range(world_size)]
    if outside:
        raise ArgumentError(
            f"may_die names ranks {outside}, but world_size={world_size} has 0 to {world_size - 1}"
        )


class _Call:
    """The parent's side of one call; worker i is rank i."""

    def __init__(self, workers: Sequence[Worker], may_die: Collection[int]) -> None:
        self._workers, self._may_die = workers, may_die
        self._running = set(range(len(workers)))
        self._returned: set[int] = set()
        self._leaving: set[int] = set()
        self._results: dict[int, bytes] = {}
        # by rank, in the order in which they failed: summary, title and text of its section, error
        self._failures: dict[int, tuple[str, str, str, BaseException]] = {}

    @property
    def _active(self) -> set[int]:
        return self._running | self._returned | self._leaving

    def run(self, task: Task, hosts: Sequence[str]) -> list[Any]:
        """Run the task to its end and return the ranks' results, or raise what went wrong."""
        limit, ending = time.monotonic() + task.timeout, False
        try:
            for rank, host in enumerate(hosts):
                self._send(rank, rank, host, task)
            while self._active and time.monotonic() < limit:
                for rank, message, data in self._events(limit):
                    self._handle(rank, message, data)
                if not ending and (self._failures or not self._running):
                    ending = True
                    seconds = FAILURE_SECONDS if self._failures else LEAVE_SECONDS
                    limit = time.monotonic() + seconds
                if ending:
                    for rank in self._returned:
                        self._send(rank, "leave")
                    self._leaving |= self._returned
                    self._returned.clear()
            if self._failures or self._active:
                raise self._error(task.timeout, ending)
        finally:
            for rank in self._active:  # by Ctrl-C, or a test's time limit, too
                self._workers[rank].kill()
            for rank, worker in enumerate(self._workers):
                for line in worker.new_log().splitlines():
                    print(f"[rank {rank}] {line}", file=sys.stderr)
        return [self._result(rank) for rank in range(len(self._workers))]

    def _send(self, rank: int, *message: object) -> None:
        channel = self._workers[rank].channel
        channel.settimeout(FAILURE_SECONDS)
        with contextlib.suppress(OSError):  # a worker that has ended, or stops, is found by reading
            send(channel, *message)

    def _events(self, limit: float) -> list[tuple[int, str, bytes]]:
        """Return the ranks' messages, deaths first: they are the cause of other ranks' errors."""
        active = {self._workers[rank].channel: rank for rank in self._active}
        ready = wait(active, max(0.0, min(POLL_SECONDS, limit - time.monotonic())))
        if time.monotonic() >= limit:
            return []  # too late: a message must not hide the hang
        events: list[tuple[int, str, bytes]] = []
        for channel, rank in active.items():
            if channel in ready:
                try:
                    message, *data = receive(channel, max(1e-3, limit - time.monotonic()))
                    events.append((rank, message, b"".join(data)))
                except (EOFError, ConnectionError):
                    events.append((rank, "died", b""))
                except TimeoutError:  # it stopped within a message
                    continue
            elif self._workers[rank].process.poll() is not None and not wait([channel], 0):
                events.append((rank, "died", b""))
        return sorted(events, key=lambda event: event[1] != "died")

    def _handle(self, rank: int, message: str, data: bytes) -> None:
        worker = self._workers[rank]
        for state in (self._running, self._returned, self._leaving):
            state.discard(rank)
        if message == "returned":
            self._returned.add(rank)
            self._results[rank] = data
        elif message == "raised":
            self._leaving.add(rank)
            summary, text, pickled = pickle.loads(data)
            error: BaseException = DistributedError(summary)
            with contextlib.suppress(Exception):  # cannot be unpickled here: the summary serves
                error = pickle.loads(pickled or b"")
            self._failures.setdefault(rank, (summary, f"rank {rank}", text, error))
        elif message == "died":
            if rank not in self._may_die:
                summary = worker.exit_text()
                title, text = f"rank {rank} {summary}", worker.new_log()[-LOG_TAIL:]
                self._failures.setdefault(rank, (summary, title, text, PeerLostError(title)))
            worker.kill()  # if it has only closed its socket

    def _error(self, timeout: float, ending: bool) -> DistributedError:
        """Return the error of failed or stuck ranks, with the stacks of those to be killed."""
        failures = self._failures
        errors = {rank: failure[3] for rank, failure in failures.items()}
        first, fate = next(iter(failures), None), "was killed; it was at"
        concerned = failures or (self._active if ending else self._running)
        of = f"rank{'s' * (len(concerned) > 1)} {', '.join(map(str, concerned))}"
        of += f" of {len(self._workers)}"
        if first is not None:
            also = f" (rank {first} first)" if len(failures) > 1 else ""
            text = f"fn failed on {of}{also}: {failures[first][0]}"
            fate = f"was killed {FAILURE_SECONDS:g} s after that; it was at"
        elif ending:
            text = f"fn returned, but {of} did not leave the process group "
            text += f"within {LEAVE_SECONDS:g} s"
        else:
            text = f"fn did not return within timeout={timeout:g} s on {of}"
        stuck = sorted(self._running | self._leaving)
        stacks = dump_stacks([self._workers[rank] for rank in stuck]) if stuck else []
        sections = [(title, section) for _, title, section, _ in failures.values()]
        sections += [(f"rank {r} {fate}", dump) for r, dump in zip(stuck, stacks, strict=True)]
        parts = [text, *(f"--- {title} ---\n{part}".rstrip() for title, part in sections)]
        message = "\n\n".join(parts)
        if first is None:
            return CollectiveTimeoutError(message)
        error = RankError(message, errors)
        error.__cause__ = errors[first]
        return error

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
