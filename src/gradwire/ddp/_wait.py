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

from gradwire.errors import CollectiveTimeoutError, DistributedError, PeerLostError

__all__ = ["LOOK_SECONDS", "translate", "wait_future", "wait_work"]

LOOK_SECONDS = 0.2
"""How often a wait looks up. A wait that ends sooner never does."""


def translate(error: BaseException, what: str) -> DistributedError:
    """The engine's error as one of ours, by what it says."""
    text = str(error)
    kind: type[DistributedError] = DistributedError
    if "timed out" in text.lower() or "timeout" in text.lower():
        kind = CollectiveTimeoutError
    elif any(sign in text for sign in ("onnection", "Broken pipe", "peer", "Socket", "socket")):
        kind = PeerLostError
    return kind(f"{what}: {text}")


def wait_work(work: Work, look: Callable[[], None], what: str, *, on_cpu: bool) -> None:
    """Wait for a work handle; on an accelerator, let the current stream wait.

    Raises:
        DistributedError: The communication failed: a subclass says how.
    """
    while True:
        try:
            if on_cpu:
                work.wait(timedelta(seconds=LOOK_SECONDS))
            else:
                work.wait()
            return
        except RuntimeError as error:
            if not on_cpu or work.is_completed():
                raise translate(error, what) from error
        look()


def wait_future(future: torch._C.Future[Any], look: Callable[[], None]) -> Any:
    """Wait for a future and return its value; what its callbacks raised is raised as it is."""
    if not future.done():
        done = threading.Event()
        future.add_done_callback(lambda _: done.set())
        while not done.wait(LOOK_SECONDS):
            look()
    return future.wait()
