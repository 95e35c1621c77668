"""Waiting for communication without waiting for a rank that has failed.

A wait polls at intervals for errors that other ranks report; each has a deadline. A backend's
failure becomes an error of gradwire's by its type, and by whether the backend's timeout was over:
never by its message.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import Work

from gradwire._engine_errors import is_transport
from gradwire._torch import is_done
from gradwire.errors import CollectiveTimeoutError

__all__ = [
    "POLL_SECONDS",
    "InFlight",
    "failure_of",
    "first_failure",
    "future_in_flight",
    "wait_done",
    "wait_future",
    "wait_work",
    "work_in_flight",
]

POLL_SECONDS = 0.2
"""How often a wait polls. A wait that ends sooner never does."""
GRACE_SECONDS = 5.0
"""How much later than the backend's own deadline ours is: the backend's error says more."""


@dataclass(frozen=True)
class InFlight:
    """Communication that a rank has under way: whether it has ended, and the backend's error.

    To be looked at, not waited for: several may be in flight, and the wait for one of them polls.
    """

    done: Callable[[], bool]
    error: Callable[[], BaseException | None]


def work_in_flight(work: Work) -> InFlight:
    """A work handle as in flight."""
    return InFlight(lambda: is_done(work), lambda: failure_of(work))


def future_in_flight(future: torch._C.Future[Any]) -> InFlight:
    """A hook's future as in flight. Its error may be the hook's own, and does not count."""
    return InFlight(future.done, lambda: None)


def failure_of(work: Work) -> BaseException | None:
    """What a work handle that has ended failed with, if it did."""
    try:
        work.wait(timedelta(seconds=1))
    except RuntimeError as error:
        return error
    return None


def wait_work(
    work: Work, poll: Callable[[], None], *, on_cpu: bool, seconds: float
) -> BaseException | None:
    """Wait for a work handle; on an accelerator, let the current stream wait.

    Returns:
        What the backend raised, if it failed. What `poll` raises is raised.
    """
    if not on_cpu:
        try:
            work.wait()
        except RuntimeError as error:
            return error
        return None
    deadline = time.monotonic() + seconds + GRACE_SECONDS
    while True:
        try:
            work.wait(timedelta(seconds=POLL_SECONDS))
            return None
        except RuntimeError:
            if is_done(work):  # failed, or ended just after the time was over
                return failure_of(work)
        poll()
        if time.monotonic() > deadline:
            return CollectiveTimeoutError(f"not done {GRACE_SECONDS:g} s after {seconds:g} s")


def wait_done(work: Work, poll: Callable[[], None]) -> None:
    """Wait until an accelerator's collective has ended; the backend has a deadline for it."""
    # `wait()` would only queue a wait on the stream. From 20 µs to 1 ms: short collectives end in
    # microseconds, long ones should not keep a core busy.
    pause = 0.0
    polled = time.monotonic()
    while not is_done(work):
        time.sleep(pause)
        pause = min(2 * pause + 2e-5, 1e-3)
        if time.monotonic() - polled > POLL_SECONDS:
            poll()
            polled = time.monotonic()


def wait_future(
    future: torch._C.Future[Any], poll: Callable[[], None], seconds: float
) -> BaseException | None:
    """Wait until a future has its value or its error. What `poll` raises is raised.

    Returns:
        An error if it has neither in time.
    """
    if future.done():
        return None
    done = threading.Event()
    future.add_done_callback(lambda _: done.set())
    deadline = time.monotonic() + seconds + GRACE_SECONDS
    while not done.wait(POLL_SECONDS):
        poll()
        if time.monotonic() > deadline:
            return CollectiveTimeoutError(f"the hook's future is not done after {seconds:g} s")
    return None


def first_failure(in_flight: Sequence[InFlight]) -> BaseException | None:
    """The first backend failure among what has ended."""
    errors = (p.error() for p in in_flight if p.done())
    return next((error for error in errors if error and is_transport(error)), None)
