"""`run_ranks`: a function on several ranks from one line, in a test or an interactive session."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from gradwire.errors import ArgumentError, ArgumentTypeError, NotSupportedError
from gradwire.testing.channel import Task, dumps
from gradwire.testing.hosts import INTERFACE, Hosts
from gradwire.testing.pool import POOL, worker_environment
from gradwire.testing.run import Run


def run_ranks(
    fn: Callable[..., Any],
    world_size: int = 2,
    *,
    backend: str = "shm",
    timeout: float = 60.0,
    args: Sequence[Any] = (),
    may_die: Collection[int] = (),
    hosts: Sequence[int] | Hosts = (),
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
            different ones share no memory then, and send each other messages. Or `hosts.Hosts`,
            where they could not share any.

    Returns:
        What `fn` returned on rank 0, 1, ….

    Raises:
        RankError: `fn` raised on a rank, or a rank's process ended. Ranks that do not end within
            a few seconds of that are killed.
        CollectiveTimeoutError: The call took longer than `timeout`. The message shows the stack of
            every thread of every rank that was still running; these are killed.
        ArgumentError, ArgumentTypeError: An argument cannot be used, or cannot be pickled.
        NotSupportedError: cloudpickle is not installed, or this is not Linux.

    Example:
        >>> def total():
        ...     x = torch.tensor([dist.get_rank() + 1.0])  # rank 0: [1.], rank 1: [2.]
        ...     dist.all_reduce(x)  # both: [3.]
        ...     return x
        >>> run_ranks(total, world_size=2)
        [tensor([3.]), tensor([3.])]
    """
    if sys.platform != "linux":
        raise NotSupportedError(f"run_ranks works on Linux, but this is {sys.platform}")
    _check(fn, world_size, backend, timeout, may_die)
    names, environment = _names_of(hosts, world_size), worker_environment()
    pool = POOL
    if isinstance(hosts, Hosts):
        pool, names = hosts.pool, [""] * world_size
        environment["GLOO_SOCKET_IFNAME"] = INTERFACE
    first = Task(
        call=_pickled_call(fn, args),
        rank=0,
        world_size=world_size,
        backend=backend,
        timeout=timeout,
        path=tuple(sys.path),
        directory=os.getcwd(),
        environment=environment,
        host=names[0],
    )
    with pool.lock:
        workers = pool.take(world_size)
        tasks = [replace(first, rank=rank, host=name) for rank, name in enumerate(names)]
        # a FileStore in a file without a name: a TCPStore resolves addresses, which takes seconds
        # if the name server does not answer, and other users can connect to it
        store = os.memfd_create("gradwire-store")
        running = Run(workers, may_die)
        try:
            return running.run(tasks, store, timeout)
        finally:
            os.close(store)
            for worker in running.lost:
                pool.discard(worker)


def _check(
    fn: object, world_size: object, backend: object, timeout: object, may_die: Collection[int]
) -> None:
    if not callable(fn):
        raise ArgumentTypeError(f"fn must be callable, but is a {type(fn).__name__}")
    if not isinstance(world_size, int):
        raise ArgumentTypeError(f"world_size must be an int, but is a {type(world_size).__name__}")
    if world_size < 1:
        raise ArgumentError(f"world_size must be at least 1, but is {world_size}")
    if not isinstance(timeout, int | float):
        raise ArgumentTypeError(
            f"timeout must be a number of seconds, but is a {type(timeout).__name__}"
        )
    if not 0 < timeout < math.inf:
        raise ArgumentError(f"timeout must be a positive number of seconds, but is {timeout}")
    if not isinstance(backend, str):
        raise ArgumentTypeError(f"backend must be a str, but is a {type(backend).__name__}")
    for part in backend.split(","):
        if not dist.is_backend_available(part.rpartition(":")[2]):
            raise ArgumentError(
                f"backend={backend!r} is not available in this build of torch; known are "
                + ", ".join(name for name in dist.Backend.backend_list if name != "undefined")
            )
    outside = [rank for rank in may_die if rank not in range(world_size)]
    if outside:
        raise ArgumentError(
            f"may_die names ranks {outside}, but world_size={world_size} has 0 to {world_size - 1}"
        )


def _names_of(hosts: Sequence[int] | Hosts, world_size: int) -> list[str]:
    """Return the name of each rank's host."""
    ranks = hosts.ranks if isinstance(hosts, Hosts) else hosts
    if not ranks:
        return [""] * world_size
    if min(ranks) < 1 or sum(ranks) != world_size:
        raise ArgumentError(
            f"hosts has {list(ranks)} ranks: give one or more for each host, {world_size} in all"
        )
    return [f"host {host}" for host, count in enumerate(ranks) for _ in range(count)]


def _pickled_call(fn: Callable[..., Any], args: Sequence[Any]) -> bytes:
    try:
        return dumps((fn, tuple(args)))
    except NotSupportedError:
        raise
    except Exception as error:
        raise ArgumentTypeError(
            f"fn and args must be picklable, to be sent to other processes: {error}"
        ) from error
