"""Waits for communication that end early if a rank fails.

A wait polls at intervals for errors that other ranks report, and has a deadline. A backend's
failure is translated to an error of gradwire by its type and by whether the backend's timeout has
passed, never by its message.
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

POLL_SECONDS = 0.2
"""Interval at which a wait polls. A shorter wait does not poll."""
GRACE_SECONDS = 5.0
"""Time after the backend's deadline at which a wait gives up. The backend's error comes first and
has more detail."""


@dataclass(frozen=True)
class InFlight:
    """Communication in progress, which can be checked without waiting."""

    done: Callable[[], bool]
    error: Callable[[], BaseException | None]  # the backend's error after the end, or None


def work_in_flight(work: Work) -> InFlight:
    return InFlight(lambda: is_done(work), lambda: failure_of(work))


def future_in_flight(future: torch._C.Future[Any]) -> InFlight:
    """Return the `InFlight` of a hook's future. Its error may be the hook's own and is ignored."""
    return InFlight(future.done, lambda: None)


def failure_of(work: Work) -> BaseException | None:
    """Return the error of a work handle that has ended, or None."""
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
        The backend's error, or None. Exceptions of `poll` are propagated.
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
            if is_done(work):  # failed, or ended just after the interval
                return failure_of(work)
        poll()
        if time.monotonic() > deadline:
            return CollectiveTimeoutError(
                f"not done {GRACE_SECONDS:g} s after the timeout of {seconds:g} s"
            )


def wait_done(work: Work, poll: Callable[[], None]) -> None:
    """Wait until an accelerator's collective has ended. The backend enforces the deadline."""
    # `wait()` would only queue a wait on the stream. The pause grows from 20 µs to 1 ms: short
    # collectives end in microseconds, and long ones should not keep a core busy.
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
    """Wait until a future has its value or its error. Exceptions of `poll` are propagated.

    Returns:
        An error if the deadline has passed, else None.
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
    """Return the first backend failure among communication that has ended, or None."""
    errors = (p.error() for p in in_flight if p.done())
    return next((error for error in errors if error and is_transport(error)), None)
