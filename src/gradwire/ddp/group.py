"""What ddp asks of a process group: its timeout, and where its small messages may live."""

from __future__ import annotations

import torch
from torch.distributed import BroadcastOptions, ProcessGroup

from gradwire._engine_errors import backend_timeout
from gradwire.shm.register import member_of

__all__ = ["broadcast_options", "cpu_capable", "message_device", "timeout_of"]


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
