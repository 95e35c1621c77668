"""Resolve arguments to a process group, a rank in it, and its store."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed import ProcessGroup, Store

from gradwire.errors import ArgumentError, ArgumentTypeError, NotSupportedError

__all__ = ["check_group", "default_group", "find_store", "keep_store", "rank_in_group", "store_of"]

_STORES: WeakKeyDictionary[ProcessGroup, Store] = WeakKeyDictionary()
"""Stores of groups that were made without torch.distributed's own functions."""


def check_group(group: object, name: str = "group") -> ProcessGroup:
    """Return the group if this rank is a member of it.

    Raises:
        ArgumentTypeError: Not a process group.
        ArgumentError: This rank is outside the group.
    """
    if isinstance(group, ProcessGroup):
        return group
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ArgumentError(
            f"{name} does not contain this rank: call from the group's members only "
            "(torch.distributed.get_process_group_ranks lists them)"
        )
    raise ArgumentTypeError(
        f"{name} is {group!r}: pass a ProcessGroup, for instance torch.distributed.group.WORLD "
        "after init_process_group"
    )


def default_group(name: str) -> ProcessGroup:
    """Return the default group, for an argument of this name that is None.

    Raises:
        ArgumentError: There is none.
    """
    if not dist.is_initialized():
        raise ArgumentError(
            f"{name} is None and there is no default group: call "
            "torch.distributed.init_process_group first, or pass a group"
        )
    group = dist.group.WORLD
    assert group is not None
    return group


def rank_in_group(
    group: ProcessGroup, rank: int | None, group_rank: int | None, name: str
) -> int | None:
    """Return the rank in the group for a global rank or a group rank; None if neither is given.

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


def keep_store(group: ProcessGroup, store: Store | None) -> None:
    """Register the store of a group unknown to torch.distributed; None removes it."""
    if store is None:
        _STORES.pop(group, None)
    else:
        _STORES[group] = store


def find_store(group: ProcessGroup) -> Store | None:
    """Return the group's store; None if it has none, for instance after its destruction."""
    if (kept := _STORES.get(group)) is not None:
        return kept
    try:
        store: Store | None = dist.distributed_c10d._get_process_group_store(group)
    except KeyError:  # destroyed, or made by hand: unknown to torch.distributed
        return None
    return store


def store_of(group: ProcessGroup, use: str) -> Store:
    """Return the group's store.

    Args:
        group: The group.
        use: Purpose of the store, for the error message.

    Raises:
        NotSupportedError: It has none.
    """
    store = find_store(group)
    if store is None:
        raise NotSupportedError(
            f"the group has no store, through which {use}: use a group that torch.distributed "
            "made with one (init_process_group or new_group; not MPI)"
        )
    return store
