"""Which group, and which rank in it: roots are named globally or within the group."""

from __future__ import annotations

from torch.distributed import ProcessGroup

from gradwire._groups import check_group, default_group, rank_in_group
from gradwire.errors import ArgumentError

__all__ = ["resolve_group", "root_of"]


def resolve_group(group: object) -> ProcessGroup:
    """The group, or the default group for None, if this rank belongs to it.

    Raises:
        ArgumentTypeError: Not a process group.
        ArgumentError: This rank is outside the group, or there is no default group.
    """
    return check_group(default_group("group") if group is None else group)


def root_of(group: ProcessGroup, rank: int | None, group_rank: int | None, name: str) -> int:
    """`rank_in_group`, for an argument that has to be given.

    Raises:
        ArgumentError: Neither or both are given, or the rank is not in the group.
    """
    root = rank_in_group(group, rank, group_rank, name)
    if root is None:
        raise ArgumentError(f"no root: give {name} (a global rank) or group_{name} (in the group)")
    return root
