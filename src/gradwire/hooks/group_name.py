"""A process group in a pickle: its name, by which every rank knows it."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

__all__ = ["GroupName", "group_from", "name_if_group"]


class GroupName(str):
    """Stands for a process group in a pickle."""

    __slots__ = ()


def name_if_group(value: Any) -> Any:
    """A group's name in its place; anything else as it is."""
    return GroupName(value.group_name) if isinstance(value, ProcessGroup) else value


def group_from(value: Any) -> Any:
    """The group that a name stands for, where the pickle is read; anything else as it is."""
    if not isinstance(value, GroupName):
        return value
    return dist.distributed_c10d._resolve_process_group(value)  # type: ignore[arg-type]
