"""Translation of backend errors (such as Gloo) into gradwire's: a rank was lost, or was late.

Errors are classified by their type and by the elapsed time, never by their message: messages differ
between backends and versions.
"""

from __future__ import annotations

import time

import torch.distributed as dist
from torch.distributed import ProcessGroup

from gradwire.errors import CollectiveTimeoutError, DistributedError, PeerLostError

SLACK_SECONDS = 1.0
"""Tolerance: a backend's clock may start before its caller's, when it accepts a collective."""


def is_transport(error: BaseException) -> bool:
    """Return True if the type of a collective's error says that its transport failed."""
    # Gloo raises a plain RuntimeError, torch.distributed a DistError, shm gradwire's own types.
    # Errors of other types, such as NotImplementedError for a dtype or OutOfMemoryError, do not
    # concern other ranks.
    return isinstance(error, DistributedError | dist.DistError) or type(error) is RuntimeError


def backend_failure(error: BaseException, what: str, *, timed_out: bool) -> DistributedError:
    """Return gradwire's error for one that a backend raised during the collective `what`."""
    if isinstance(error, DistributedError):  # of shm
        return type(error)(f"{what}: {error}")
    kind = CollectiveTimeoutError if timed_out else PeerLostError
    if isinstance(error, dist.DistNetworkError):
        kind = PeerLostError
    return kind(f"{what}: {error}")


def is_over(since: float, timeout: float) -> bool:
    """Return True if a backend's timeout for a collective started at `since` has elapsed."""
    return time.monotonic() - since >= timeout - min(SLACK_SECONDS, timeout / 10)


def backend_timeout(group: ProcessGroup) -> float:
    """Return the group's timeout in seconds; PyTorch's default if its backends have none."""
    for device in group._device_types:
        timeout = getattr(group._get_backend(device).options, "_timeout", None)
        if timeout is not None:
            seconds: float = timeout.total_seconds()
            return seconds
    return float(dist.default_pg_timeout.total_seconds())
