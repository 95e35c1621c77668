"""Runs a benchmark's work on the ranks of one launch, and returns rank 0's result."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from gradwire.cli.launch import RankEnv, RankFailure, Send, join_group
from gradwire.cli.launch import launch as launch_ranks

__all__ = ["launch"]

T = TypeVar("T")
TIMEOUT = timedelta(minutes=2)


def launch(work: Callable[..., T], *args: object, world_size: int, backend: str) -> T:
    """Run `work(*args)` on `world_size` ranks of one thread each; return rank 0's result.

    Args:
        work: A module's function; it finds the default process group initialised.
        args: Given to every rank; picklable.
        world_size: Processes, >= 1.
        backend: A torch.distributed backend that carries CPU tensors.

    Raises:
        RankFailure: A rank raised or died; its traceback is printed.
    """
    results: list[T] = []
    try:
        launch_ranks(partial(_rank, work, args, backend), world_size, results.append)
    except RankFailure as failure:
        print(failure.details, end="", file=sys.stderr)
        raise
    (result,) = results
    return result


def _rank(
    work: Callable[..., object], args: tuple[Any, ...], backend: str, env: RankEnv, send: Send
) -> None:
    torch.set_num_threads(1)
    # as under torchrun: libraries look at these
    os.environ |= {"RANK": str(env.rank), "LOCAL_RANK": str(env.rank)}
    os.environ |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(env.world_size))
    join_group(env, backend, TIMEOUT)
    result = work(*args)
    if env.rank == 0:
        send(result)
    dist.destroy_process_group()
