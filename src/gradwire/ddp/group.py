"""What ddp asks of a process group: membership, roots, where its small messages may live."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from gradwire._engine_errors import engine_timeout
from gradwire.errors import ArgumentError, ArgumentTypeError
from gradwire.shm.register import member_of

__all__ = ["check_group", "cpu_capable", "message_device", "resolve_root", "timeout_of"]


def check_group(group: object) -> ProcessGroup:
    """The group, if this rank is a member of it.

    Raises:
        ArgumentTypeError: Not a process group.
        ArgumentError: This rank is outside the group.
    """
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ArgumentError(
            "group does not contain this rank: call from the group's members only "
            "(torch.distributed.get_process_group_ranks lists them)"
        )
    if not isinstance(group, ProcessGroup):
        raise ArgumentTypeError(
            f"group is {group!r}: pass a ProcessGroup, for instance torch.distributed.group.WORLD "
            "after init_process_group"
        )
    return group


def resolve_root(group: ProcessGroup, src: int | None, group_src: int | None) -> int:
    """The root's rank in the group, from a global rank, a rank in the group, or neither (0).

    Raises:
        ArgumentError: Both are given, or the rank is not in the group.
    """
    if src is not None and group_src is not None:
        raise ArgumentError(
            f"src={src} (a global rank) and group_src={group_src} (a rank in the group) are both "
            "given: give one"
        )
    if src is not None:
        members = dist.get_process_group_ranks(group)
        if src not in members:
            raise ArgumentError(f"src is global rank {src}: the group's ranks are {members}")
        return members.index(src)
    root = 0 if group_src is None else group_src
    if not 0 <= root < group.size():
        raise ArgumentError(f"group_src is {root}: the group's ranks are 0 to {group.size() - 1}")
    return root


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
    return engine_timeout(group)
