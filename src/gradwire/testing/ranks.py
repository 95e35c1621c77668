"""`run_ranks`: a function on several ranks from one line, and the processes that are kept for it.

Parent and worker exchange messages through a socket. The parent waits for each part of a message
for a limited time only: a process may stop in the middle of one.

A rank runs, has returned (and keeps its group, which other ranks may still need), is leaving its
group, or is done: its worker is idle or dead. When all have returned, or one has failed, those that
returned are released.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import io
import itertools
import math
import mmap
import os
import pickle
import random
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache, partial
from multiprocessing.connection import wait
from types import FunctionType, ModuleType
from typing import Any

import torch
import torch.distributed as dist

from gradwire._gloo_threads import await_gloo_threads
from gradwire._processes import LIBC, after_fork, end_when_closed, exit_text
from gradwire.errors import (
    ArgumentError,
    ArgumentTypeError,
    CollectiveTimeoutError,
    DistributedError,
    NotSupportedError,
    PeerLostError,
)
from gradwire.shm import Options

START_SECONDS = 120.0
"""Time limit for new workers to import torch."""
_PIECE_BYTES = 1 << 20
_SHOWS_STACKS = hasattr(faulthandler, "register")  # not on Windows
_START = "from gradwire.testing.ranks import main; import sys; main(*sys.argv[1:])"


@dataclass(frozen=True)
class Task:
    """Part of a call that is the same for all ranks."""

    call: bytes
    world_size: int
    backend: str
    timeout: float
    store: str
    environment: dict[str, str]
    path: tuple[str, ...]
    directory: str


# --- messages ---


def send(channel: socket.socket, *message: object) -> None:
    """Send a message, after its length."""
    data = pickle.dumps(message)
    channel.sendall(len(data).to_bytes(8) + data)


def receive(channel: socket.socket, timeout: float | None = None) -> tuple[Any, ...]:
    """Return a message; raise EOFError or ConnectionError if the other process ended."""
    channel.settimeout(timeout)
    data, size = bytearray(), 8
    while len(data) < size:
        piece = channel.recv(min(size - len(data), _PIECE_BYTES))
        if not piece:
            raise EOFError
        data += piece
        if len(data) == size == 8:
            size += int.from_bytes(data)
    message: tuple[Any, ...] = pickle.loads(memoryview(data)[8:])
    return message


# --- the parent's side ---


def worker_environment() -> dict[str, str]:
    """Return this process's environment, with settings for ranks that share a machine."""
    # or Gloo resolves the host's name, for which there may be no entry
    loopback = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    settings = {"GLOO_SOCKET_IFNAME": loopback[0]} if loopback else {}
    return {**settings, **os.environ, "OMP_NUM_THREADS": "1"}


class Worker:
    """One process; its stderr goes to a file without a name, from which errors quote."""

    def __init__(self, prefix: Sequence[str] = ()) -> None:
        environment = worker_environment()
        environment["PYTHONPATH"] = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        self._relayed = 0
        with contextlib.ExitStack() as ours:
            self._log = ours.enter_context(tempfile.TemporaryFile(buffering=0))
            command = [*prefix, sys.executable, "-c", _START]
            # The worker holds the reading end of a pipe that nobody writes to, its lifeline:
            # however the parent ends, the kernel closes the writing end, and the worker ends too.
            start = partial(
                subprocess.Popen[bytes], stdin=subprocess.PIPE, stderr=self._log, env=environment
            )
            if sys.platform == "win32":  # no process inherits a socket; others may connect
                secret = secrets.token_hex()
                with socket.create_server(("127.0.0.1", 0)) as server:
                    server.settimeout(START_SECONDS)
                    self.process = start([*command, str(server.getsockname()[1]), secret])
                    self.channel, _ = server.accept()
                if self.channel.recv(len(secret), socket.MSG_WAITALL) != secret.encode():
                    raise DistributedError("another process connected to run_ranks")
            else:
                self.channel, theirs = socket.socketpair()
                with theirs:
                    number = theirs.fileno()
                    self.process = start([*command, str(number), ""], pass_fds=[number])
            ours.enter_context(self.channel)
            assert self.process.stdin is not None
            ours.enter_context(self.process.stdin)
            self._descriptors = ours.pop_all()

    def kill(self) -> None:
        """Kill the process; the pool's next `take` replaces it."""
        self.process.kill()
        self.process.wait()

    def end(self, *, kill: bool = True) -> None:
        """Close the process's descriptors, after killing it; a forked child must not kill."""
        if kill:
            self.kill()
        self.process.returncode = 0  # or Popen warns, in a forked child, that it is running
        self._descriptors.close()

    def exit_text(self) -> str:
        """Return how the process ended."""
        try:
            return exit_text(self.process.wait(timeout=2.0))
        except subprocess.TimeoutExpired:
            return "closed its connection to run_ranks"

    def new_log(self) -> str:
        """Return the stderr of the process since the last call."""
        start, self._relayed = self._relayed, os.fstat(self._log.fileno()).st_size
        if start == self._relayed:
            return ""
        # mapped: reading would move the position, at which the process writes
        with mmap.mmap(self._log.fileno(), self._relayed, access=mmap.ACCESS_READ) as log:
            text = log[start:]
        return text.decode(errors="replace")


def dump_stacks(workers: Sequence[Worker]) -> list[str]:
    """Return the stacks of all threads of each worker, after its earlier output to stderr."""
    logs = [worker.new_log() for worker in workers]
    # faulthandler writes them from a signal handler, whatever holds the GIL.
    for worker in workers if _SHOWS_STACKS else ():
        worker.process.send_signal(signal.SIGUSR1)
    stacks = [""] * len(workers)
    now = time.monotonic()
    deadline, grew = now + 3.0, now
    # A dump counts as complete when it has not grown for 0.25 s.
    while now < deadline and not (all(stacks) and now > grew + 0.25):
        time.sleep(0.02)
        now = time.monotonic()
        for index, worker in enumerate(workers):
            if more := worker.new_log():
                stacks[index] += more
                grew = now
    none = "(it did not show its stack: it is stopped, inside the kernel, or on Windows)"
    return [log + (stack or none) for log, stack in zip(logs, stacks, strict=True)]


class Pool:
    """Idle workers; worker i is rank i of whatever call comes next."""

    # Number of workers on each host, if they are on several, and the network interface between
    # these.
    ranks: tuple[int, ...] = ()
    interface = "lo"

    def __init__(self, prefix_of: Callable[[int], Sequence[str]] = lambda _: ()) -> None:
        self.lock = threading.Lock()
        self._prefix_of = prefix_of
        self._workers: dict[int, Worker] = {}

    def take(self, count: int) -> list[Worker]:
        """Return the first `count` workers, after starting those that are missing."""
        for number, worker in list(self._workers.items()):
            if worker.process.poll() is not None:
                self._workers.pop(number).end()
        # a worker keeps its number, which may say on which host it is
        missing = [number for number in range(count) if number not in self._workers]
        try:
            for number in missing:
                self._workers[number] = Worker(self._prefix_of(number))
            deadline = time.monotonic() + START_SECONDS
            for number in missing:
                worker = self._workers[number]
                receive(worker.channel, max(deadline - time.monotonic(), 1e-3))
        except BaseException as error:
            text = None
            if isinstance(error, EOFError | ConnectionError):
                text = f"a worker process {worker.exit_text()} at its start:\n{worker.new_log()}"
            elif isinstance(error, TimeoutError):
                text = f"a worker process was not ready within {START_SECONDS:g} s"
            self.close()
            if text is None:
                raise
            raise DistributedError(text) from error
        return [self._workers[number] for number in range(count)]

    def close(self, *, kill: bool = True) -> None:
        """Kill all workers; the next `take` starts new ones."""
        while self._workers:
            self._workers.popitem()[1].end(kill=kill)


POOL = Pool()
"""This process's pool."""


@atexit.register
def _at_exit() -> None:
    # a thread within a call holds the lock; its workers end with their lifelines
    if POOL.lock.acquire(blocking=False):
        POOL.close()


def _after_fork() -> None:
    POOL.lock = threading.Lock()  # another thread of the parent may have held it
    POOL.close(kill=False)


after_fork(_after_fork)


# --- pickles for processes that cannot import what defines a function ---
#
# cloudpickle pickles lambdas and local functions by value, but a module's own functions and classes
# by name, which fails for a test module that only pytest can import. Those go by value here too.


def load_cloudpickle() -> ModuleType:
    """Return the cloudpickle module, or raise an error that says how to install it."""
    try:
        import cloudpickle
    except ImportError as error:
        raise NotSupportedError(
            "run_ranks sends functions with cloudpickle, which is not installed: "
            "pip install 'gradwire[test]'"
        ) from error
    module: ModuleType = cloudpickle
    return module


def dumps(value: object) -> bytes:
    """Pickle `value`, by value where a new process could not import what it refers to."""
    cloudpickle = load_cloudpickle()
    by_value: set[ModuleType] = set()

    class Pickler(cloudpickle.CloudPickler):  # type: ignore[name-defined, misc]
        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, FunctionType | type):
                module = sys.modules.get(obj.__module__)
                if module is not None and not _importable(obj.__module__, tuple(sys.path)):
                    cloudpickle.register_pickle_by_value(module)
                    by_value.add(module)
            return super().reducer_override(obj)

    buffer = io.BytesIO()
    try:
        Pickler(buffer).dump(value)
    finally:
        for module in by_value:
            cloudpickle.unregister_pickle_by_value(module)
    return buffer.getvalue()


@lru_cache(maxsize=1024)
def _importable(name: str, path: tuple[str, ...]) -> bool:
    """Return True if a new process with this `sys.path` could import a module read from a file."""
    made_from = getattr(sys.modules[name], "__spec__", None)
    # Modules that packages create at run time (`torch.ops`, parts of extension modules) have no
    # file; importing their package creates them again.
    if made_from is None or not made_from.has_location or name == "__main__":
        return True
    search: Sequence[str] | None = None
    parts = name.split(".")
    for depth in range(1, len(parts) + 1):
        # importlib.util.find_spec would answer from sys.modules, which a new process does not have
        specs = (finder.find_spec(".".join(parts[:depth]), search) for finder in sys.meta_path)
        found = next((spec for spec in specs if spec is not None), None)
        if found is None:
            return False
        search = found.submodule_search_locations
    return True


# --- the worker's side ---


def main(number: str, secret: str) -> None:
    """Run tasks, one after the other, until the parent ends."""
    if secret:
        channel = socket.create_connection(("127.0.0.1", int(number)))
        channel.sendall(secret.encode())
    else:
        channel = socket.socket(fileno=int(number))
    lifeline, nothing = os.dup(0), os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    end_when_closed(lifeline)
    channel.set_inheritable(False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    if LIBC is not None:
        import resource  # here: missing on some systems

        # tests let ranks crash on purpose: the stack is in the log, a core file is not needed
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    faulthandler.enable(all_threads=True)
    _show_stacks_on_request()
    handlers = {signum: signal.getsignal(signum) for signum in signal.valid_signals()}
    gc.freeze()  # leaves the imported modules out of the collection after each call
    send(channel, "idle")
    # the parent kills this process; end-of-file here means that the parent has ended
    with contextlib.suppress(EOFError, ConnectionError):
        for earlier in itertools.count():
            rank, host, task = receive(channel)
            store = _open_store(task.store, earlier) if LIBC is not None else None
            imported = len(sys.modules)
            for signum, handler in handlers.items():
                if handler is not None and signal.getsignal(signum) != handler:
                    signal.signal(signum, handler)
            _show_stacks_on_request()
            _serve(channel, task, rank, host, store)
            if len(sys.modules) > imported:
                # modules that a task imports, too: torch.compile's, which torch's DDP imports,
                # make a collection take 50 ms and more, instead of 3 ms in a fresh worker
                gc.freeze()
            if store is not None:
                os.close(store)
            send(channel, "idle")
    os._exit(0)


def _show_stacks_on_request() -> None:
    if _SHOWS_STACKS:
        # by its own account faulthandler may have it still, when a task has changed the handler:
        # `register` alone would do nothing
        faulthandler.unregister(signal.SIGUSR1)
        faulthandler.register(signal.SIGUSR1, all_threads=True)


def _open_store(path: str, earlier: int) -> int:
    """Open a store's file with a number that no earlier one had, nor any other file will have."""
    # Linux: the file is removed when all have opened it, so that none is left however they end.
    # A group that outlives its task (an autograd graph in a reference cycle may hold it) writes to
    # its FileStore when it is deleted, by the path of the descriptor. If another file had this
    # number by then, torch would read that file as a store, without end; it skips a path that is
    # gone.
    import fcntl
    import resource

    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    soft = min(resource.getrlimit(resource.RLIMIT_NOFILE)[0], 4096)
    number = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, soft // 2 + earlier % (soft // 4))
    os.close(descriptor)
    return number


def _serve(channel: socket.socket, task: Task, rank: int, host: str, store: int | None) -> None:
    """Run a task in a new group, and leave that when no rank needs it any longer."""
    try:
        os.chdir(task.directory)
        sys.path[:] = task.path
        for name in os.environ.keys() - task.environment.keys():
            del os.environ[name]
        os.environ.update(task.environment)
        torch.set_num_threads(1)
        random.seed(rank)
        torch.manual_seed(rank)
        with warnings.catch_warnings():
            fn, args = pickle.loads(task.call)
            _join(task, rank, host, store)
            result = fn(*args)
        try:
            outcome, kind = load_cloudpickle().dumps(result), "returned"
        except Exception as error:
            raise ArgumentTypeError(
                f"fn returned a {type(result).__name__}, which cannot be pickled ({error}); "
                "return tensors, numbers or other values that can"
            ) from error
    except BaseException as error:  # SystemExit and the like too: a task ends, the process goes on
        outcome, kind = _pickled_error(error), "raised"
    sys.stdout.flush()
    sys.stderr.flush()
    send(channel, kind, outcome)
    if kind == "returned":
        # other ranks may still need this one's connections; after an error it leaves at once, so
        # that they do not wait for it
        receive(channel)
    elif not dist.is_initialized():
        # where a group was not formed, torch's count of groups differs from the other ranks'
        os._exit(1)
    # Gloo's destructor keeps the GIL while it waits for threads, which may need it once more
    await_gloo_threads()
    try:
        if dist.is_initialized():
            dist.destroy_process_group()
    except Exception as error:
        send(channel, "raised", _pickled_error(error))
        os._exit(1)
    gc.collect()


def _join(task: Task, rank: int, host: str, store: int | None) -> None:
    shared = dist.FileStore(task.store if store is None else f"/proc/self/fd/{store}")
    dist.init_process_group(
        task.backend,
        store=shared,
        rank=rank,
        world_size=task.world_size,
        # longer than the call may take: its error shows where a rank hangs, not a group's timeout
        timeout=timedelta(seconds=task.timeout + 30),
        pg_options=Options(host=host) if host else None,
    )
    # wait for all: a rank that fails at once would break connections that others still make
    if shared.add("joined", 1) == task.world_size:
        if store is not None:
            os.unlink(task.store)
        shared.set("all joined", "")
    while not shared.check(["all joined"]):
        time.sleep(0.001)


def _pickled_error(error: BaseException) -> bytes:
    """Return the error as two texts and, if it can be pickled and unpickled, as an object."""
    here = error.__traceback__
    stack = here.tb_next if here is not None else None  # without the frame of `_serve`
    text = "".join(traceback.format_exception(type(error), error, stack or here))
    summary = f"{type(error).__name__}: {error}".splitlines()[0]
    try:
        data: bytes | None = load_cloudpickle().dumps(error)
        pickle.loads(data or b"")  # an exception with arguments of its own often fails only here
    except Exception:
        data = None
    return pickle.dumps((summary, text.rstrip(), data))


# --- a call ---


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
