"""Waiting for communication without waiting for a rank that has failed.

A wait looks up from time to time and calls `look`, which raises if another rank has reported an
error. An engine's own errors become gradwire's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import Work

from gradwire.collectives.failures import kind_of
from gradwire.errors import DistributedError

__all__ = ["LOOK_SECONDS", "translate", "wait_future", "wait_work"]

LOOK_SECONDS = 0.2
"""How often a wait looks up. A wait that ends sooner never does."""


def translate(error: BaseException, what: str) -> DistributedError:
    """The engine's error as one of ours, by what it says."""
    kind = kind_of(error) or DistributedError
    return kind(f"{what}: {error}")


def wait_work(work: Work, look: Callable[[], None], *, on_cpu: bool) -> BaseException | None:
    """Wait for a work handle; on an accelerator, let the current stream wait.

    Returns:
        What the engine raised, if it failed. What `look` raises is raised.
    """
    while True:
        try:
            if on_cpu:
                work.wait(timedelta(seconds=LOOK_SECONDS))
            else:
                work.wait()
            return None
        except RuntimeError as error:
            if not on_cpu:
                return error
            if work.is_completed():  # failed, or ended just after the time was over
                return _error_of(work)
        look()


def _error_of(work: Work) -> BaseException | None:
    """What a work handle that has ended failed with, if it did."""
    try:
        work.wait()
    except RuntimeError as error:
        return error
    return None


def wait_future(future: torch._C.Future[Any], look: Callable[[], None]) -> None:
    """Wait until a future has its value or its error. What `look` raises is raised."""
    if not future.done():
        done = threading.Event()
        future.add_done_callback(lambda _: done.set())
        while not done.wait(LOOK_SECONDS):
            look()
