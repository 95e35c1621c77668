"""Which group, and which rank in it: roots are named globally or within the group."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from gradwire.errors import ArgumentError, ArgumentTypeError

__all__ = ["dense_tensor", "member", "peer", "root_of", "with_data"]


def member(group: object) -> ProcessGroup:
    """The group, or the default group for None, if this rank belongs to it.

    Raises:
        ArgumentTypeError: Not a process group.
        ArgumentError: This rank is outside the group, or there is no default group.
    """
    if group is None:
        if not dist.is_initialized():
            raise ArgumentError(
                "group is None and there is no default group: call "
                "torch.distributed.init_process_group first, or pass a group"
            )
        group = dist.group.WORLD
    if isinstance(group, ProcessGroup):
        return group
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ArgumentError(
            "group does not contain this rank: call from the group's members only "
            "(torch.distributed.get_process_group_ranks lists them)"
        )
    raise ArgumentTypeError(
        f"group is {group!r}: pass a ProcessGroup, or None for the default group"
    )


def dense_tensor(x: object, name: str = "x") -> None:
    """Raise if it is no tensor, or one without strides.

    Raises:
        ArgumentTypeError: Not a tensor.
        ArgumentError: Sparse, or of another layout than strided.
    """
    if not isinstance(x, Tensor):
        raise ArgumentTypeError(f"{name} is a {type(x).__name__}: give a tensor")
    if x.layout != torch.strided:
        raise ArgumentError(
            f"{name} has layout {x.layout}: give dense tensors, for instance its parts"
        )


def with_data(x: Tensor, name: str) -> None:
    """Raise if it is a tensor on "meta", which has nothing to send.

    Raises:
        ArgumentError: It is.
    """
    if x.device.type == "meta":
        raise ArgumentError(f"{name} is on meta on the root: give the tensor to send")


def peer(group: ProcessGroup, rank: int | None, group_rank: int | None, name: str) -> int | None:
    """A rank of the group from its global rank or its rank in the group; None if neither is given.

    Raises:
        ArgumentError: Both are given, or the rank is not in the group.
    """
    if rank is None:
        if group_rank is not None and not 0 <= group_rank < group.size():
            raise ArgumentError(
                f"group_{name} is {group_rank}: the group's ranks are 0 to {group.size() - 1}"
            )
        return group_rank
    if group_rank is not None:
        raise ArgumentError(
            f"{name}={rank} (a global rank) and group_{name}={group_rank} (a rank in the group) "
            "are both given: give one"
        )
    if group is dist.group.WORLD:
        members = list(range(group.size()))
    else:
        members = dist.get_process_group_ranks(group)
    if rank not in members:
        raise ArgumentError(f"{name} is global rank {rank}: the group's ranks are {members}")
    return members.index(rank)


def root_of(group: ProcessGroup, rank: int | None, group_rank: int | None, name: str) -> int:
    """`peer`, for an argument that has to be given.

    Raises:
        ArgumentError: Neither or both are given, or the rank is not in the group.
    """
    root = peer(group, rank, group_rank, name)
    if root is None:
        raise ArgumentError(f"no root: give {name} (a global rank) or group_{name} (in the group)")
    return root
