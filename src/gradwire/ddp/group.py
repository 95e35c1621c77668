"""Properties of a process group: timeout, errors, devices of its small messages."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.distributed import BroadcastOptions, ProcessGroup

from gradwire._engine_errors import backend_failure, backend_timeout, is_over, is_transport
from gradwire.errors import DistributedError
from gradwire.recorder import record_error
from gradwire.shm import shm_backend_of


def broadcast_options(root: int) -> BroadcastOptions:
    """Return the options of a broadcast from a rank of the group."""
    options = BroadcastOptions()
    options.rootRank = root
    return options


def cpu_capable(group: ProcessGroup) -> bool:
    """Return True if the group supports CPU tensors. Assume so if it does not list devices."""
    kinds = [device.type for device in group._device_types]
    return not kinds or "cpu" in kinds


def message_device(group: ProcessGroup) -> torch.device:
    """Return a device whose tensors the group supports: the CPU if possible."""
    if cpu_capable(group):
        return torch.device("cpu")
    kind = group._device_types[0].type
    return torch.device(kind, torch.accelerator.current_device_index())


def waits_on_cpu(group: ProcessGroup, device: torch.device) -> bool:
    """Return True if waiting for a collective of a device's tensors blocks the CPU.

    Other backends only queue a wait on the accelerator's stream. Gloo copies an accelerator's
    tensors to the host, and its waits end when the other ranks have answered.
    """
    if device.type == "cpu":
        return True
    try:
        return str(group._get_backend(device).name()) == "gloo"
    except RuntimeError:  # no backend for the device, or a group in Python
        return False


def timeout_of(group: ProcessGroup) -> float:
    """Return the group's timeout in seconds; PyTorch's default if it has none."""
    if (member := shm_backend_of(group)) is not None:
        return member.timeout.total_seconds()
    return backend_timeout(group)


@contextmanager
def backend_errors(group: ProcessGroup, what: str, since: float | None = None) -> Iterator[None]:
    """Raise PeerLostError or CollectiveTimeoutError for a backend's error in this context.

    `what` names the collective, which was sent at `since`, the start of the context by default.
    """
    since = time.monotonic() if since is None else since
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, DistributedError) or not is_transport(error):
            raise
        failure = backend_failure(error, what, timed_out=is_over(since, timeout_of(group)))
        record_error(failure)
        raise failure from error
