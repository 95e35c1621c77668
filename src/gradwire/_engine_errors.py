"""What the error means that a backend such as Gloo ends a collective with: a rank lost, or late.

By its type and by the time that has passed, never by its message: those differ between backends and
their versions.
"""

from __future__ import annotations

import time

import torch.distributed as dist
from torch.distributed import ProcessGroup

from gradwire.errors import CollectiveTimeoutError, DistributedError, PeerLostError

__all__ = ["backend_failure", "backend_timeout", "is_over", "is_transport"]

SLACK_SECONDS = 1.0
"""A backend's clock starts when it takes a collective, which may be before its caller's does."""


def is_transport(error: BaseException) -> bool:
    """Whether an error that a collective under way ended with is of its transport, by its type.

    Gloo's are plain RuntimeErrors, torch.distributed's DistErrors, those of shm ours. What is of
    another type, NotImplementedError for a dtype or OutOfMemoryError, says nothing of other ranks.
    """
    return isinstance(error, DistributedError | dist.DistError) or type(error) is RuntimeError


def backend_failure(error: BaseException, what: str, *, timed_out: bool) -> DistributedError:
    """What a backend reported of a collective that was under way, as an error of ours.

    Args:
        error: The backend's.
        what: What was under way.
        timed_out: Whether the backend's time for it was over.
    """
    if isinstance(error, DistributedError):  # of shm
        return type(error)(f"{what}: {error}")
    kind = CollectiveTimeoutError if timed_out else PeerLostError
    if isinstance(error, dist.DistNetworkError):
        kind = PeerLostError
    return kind(f"{what}: {error}")


def is_over(since: float, timeout: float) -> bool:
    """Whether a backend's time for a collective that was started at `since` is over.

    Args:
        since: Of `time.monotonic`, at once after the start.
        timeout: The group's, in seconds.
    """
    return time.monotonic() - since >= timeout - min(SLACK_SECONDS, timeout / 10)


def backend_timeout(group: ProcessGroup) -> float:
    """Seconds that PyTorch's backends give a collective; torch's default where they do not say."""
    for device in group._device_types:
        timeout = getattr(group._get_backend(device).options, "_timeout", None)
        if timeout is not None:
            seconds: float = timeout.total_seconds()
            return seconds
    return float(dist.default_pg_timeout.total_seconds())
