"""Runs a benchmark's work on the ranks of one launch, and returns rank 0's result."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from gradwire.testing import run_ranks
from gradwire.testing.ranks import POOL

__all__ = ["launch"]

T = TypeVar("T")
SECONDS = 24 * 3600.0
"""Time limit of a launch: a benchmark of all cases takes hours."""


def launch(work: Callable[..., T], *args: object, world_size: int, backend: str) -> T:
    """Run `work(*args)` on `world_size` ranks of one thread each; return rank 0's result.

    Args:
        work: A module's function; it finds the default process group initialised.
        args: Given to every rank; picklable.
        world_size: Processes, >= 1.
        backend: A torch.distributed backend that carries CPU tensors.

    Raises:
        RankError: A rank raised or died.
    """
    POOL.close()  # memory is measured in new processes
    given = (work, args)
    result: T = run_ranks(_rank, world_size, backend=backend, timeout=SECONDS, args=given)[0]
    return result


def _rank(work: Callable[..., object], args: tuple[Any, ...]) -> object:
    # progress is shown at once, and not when the call ends
    os.dup2(os.open(f"/proc/{os.getppid()}/fd/2", os.O_WRONLY | os.O_APPEND), 2)
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    # as under torchrun: libraries look at these
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    result = work(*args)
    return result if dist.get_rank() == 0 else None
