"""What ddp asks of a process group: its timeout, its errors, where its small messages may live."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.distributed import BroadcastOptions, ProcessGroup

from gradwire._engine_errors import backend_failure, backend_timeout, is_over, is_transport
from gradwire.errors import DistributedError
from gradwire.recorder import failed
from gradwire.shm.register import member_of


def broadcast_options(root: int) -> BroadcastOptions:
    """Options of a broadcast from a rank of the group."""
    options = BroadcastOptions()
    options.rootRank = root
    return options


def cpu_capable(group: ProcessGroup) -> bool:
    """Whether the group carries CPU tensors; one that does not say, written in Python, may."""
    kinds = [device.type for device in group._device_types]
    return not kinds or "cpu" in kinds


def message_device(group: ProcessGroup) -> torch.device:
    """A device whose tensors the group carries: the CPU where it can."""
    if cpu_capable(group):
        return torch.device("cpu")
    kind = group._device_types[0].type
    return torch.device(kind, torch.accelerator.current_device_index())


def timeout_of(group: ProcessGroup) -> float:
    """Seconds that the group gives a collective; torch's default where it does not say."""
    if (member := member_of(group)) is not None:
        return member.timeout.total_seconds()
    return backend_timeout(group)


@contextmanager
def backend_errors(group: ProcessGroup, what: str, since: float | None = None) -> Iterator[None]:
    """Raise what a backend ends a collective with, which is waited for inside, as ours.

    Args:
        group: The group.
        what: What is waited for.
        since: When it was sent, of `time.monotonic`; None: inside.

    Raises:
        PeerLostError, CollectiveTimeoutError: Another rank is gone, or stayed away.
    """
    since = time.monotonic() if since is None else since
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, DistributedError) or not is_transport(error):
            raise
        failure = backend_failure(error, what, timed_out=is_over(since, timeout_of(group)))
        failed(failure)
        raise failure from error
