"""What torch.distributed calls the groups, and which ranks are in them."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

_TRIES = 8
_known: dict[str, GroupInfo] = {}
_rank: list[int] = []
_at_end: list[Callable[[], None]] = []


class GroupInfo:
    """A group of torch.distributed.

    Attributes:
        name, desc: As torch.distributed has them.
        ranks: Its global ranks, in their order in the group.
        reference: To the group: a name may be used again for another one.
        world: To the default group that there was; None if there was none.
    """

    def __init__(self, name: str, desc: str, ranks: list[int], group: Any) -> None:
        self.name, self.desc, self.ranks = name, desc, ranks
        self.reference = reference_to(group)
        world = dist.group.WORLD
        self.world = None if world is None else weakref.ref(world)

    def count(self) -> int | None:
        """How many collectives torch has recorded of it.

        None if it is gone, does not count, or has several backends, which count apart.
        """
        group = self.reference()
        if group is None:
            return None
        if type(group) is not ProcessGroup:  # shm's
            return 0
        try:
            if len({group._get_backend(d) for d in group._device_types}) > 1:
                return None
            return int(group._get_sequence_number_for_group())  # type: ignore[attr-defined]
        except RuntimeError:
            return None


def reference_to(group: Any) -> weakref.ref[Any]:
    """A weak reference that can be looked up in a dict when the group is gone, too."""
    reference = weakref.ref(group)
    hash(reference)  # it keeps that
    return reference


class RecordedGroup:
    """A group as its backend knows it; its name is found when torch.distributed has it.

    Args:
        backend: The backend, or a group that is written in Python.

    Attributes:
        named: Whether the name is known, or is not looked for any more.
    """

    def __init__(self, backend: object) -> None:
        self._backend = weakref.ref(backend)
        self._info: GroupInfo | None = None
        self._tries = 0
        self.named = False

    def find_name(self) -> GroupInfo | None:
        """Look for the group among those of torch.distributed."""
        if self._info is None:
            self._tries += 1
            self._info = _find(self._backend())
            self.named = self._info is not None or self._tries >= _TRIES
        return self._info


def known_groups() -> dict[str, GroupInfo]:
    """All groups of this process that torch.distributed has, and those it had when last asked."""
    world = dist.distributed_c10d._world
    for group, name in list(world.pg_names.items()):
        _note(group, name)  # anew: a name may be used again
    return {name: info for name, info in list(_known.items()) if in_this_world(info)}


def info_of(group: ProcessGroup | None) -> GroupInfo | None:
    """What is known of a group; None if that is nothing."""
    name = dist.distributed_c10d._world.pg_names.get(group) if group is not None else None
    return None if name is None else _note(group, name)


def in_this_world(info: GroupInfo) -> bool:
    """Whether it belongs to the present default group, not to one of an earlier job.

    Without a default group, every group does: the last job is what a reader wants to see.
    """
    return not dist.is_initialized() or info.world is None or info.world() is dist.group.WORLD


def number_of_last(group: ProcessGroup | None) -> int:
    """The number of a group's last collective; 0 on shm, whose own entries have it."""
    # a group on shm is called as a Python object, whatever its class
    if type(group) is not ProcessGroup:
        return 0
    try:
        return int(group._get_sequence_number_for_group())  # type: ignore[attr-defined]
    except RuntimeError:  # a backend that does not count
        return 0


def this_rank() -> int | None:
    """This process's global rank, also after its default group was destroyed; None if unknown."""
    if dist.is_initialized():
        _rank[:] = [dist.get_rank()]
    return _rank[0] if _rank else None


def _find(backend: object) -> GroupInfo | None:
    if backend is None:
        return None
    for group, name in list(dist.distributed_c10d._world.pg_names.items()):
        if group is backend or _backend_for_cpu(group) is backend:
            this_rank()
            return _note(group, name)
    return None


def _backend_for_cpu(group: Any) -> object:
    cpu = torch.device("cpu")
    try:
        if cpu not in group._device_types:
            return None
        found = group._get_backend(cpu)
    except (AttributeError, RuntimeError):  # a member of another group, or written in Python
        return None
    return getattr(found, "wrapped_pg", found)


def _note(group: Any, name: str) -> GroupInfo | None:
    ranks = dist.distributed_c10d._world.pg_group_ranks.get(group)
    if ranks is None:
        return None
    desc = getattr(group, "group_desc", "") or "undefined"
    _known[str(name)] = info = GroupInfo(
        str(name), desc, sorted(ranks, key=ranks.__getitem__), group
    )
    return info


def at_end_of_job(callback: Callable[[], None]) -> None:
    """Have something called each time before the default group is destroyed."""
    if not hasattr(dist.destroy_process_group, "gradwire_is_told"):
        _listen()
    _at_end.append(callback)


def not_at_end_of_job(callback: Callable[[], None]) -> None:
    """Undo `at_end_of_job`."""
    _at_end.remove(callback)


def _listen() -> None:
    theirs = dist.destroy_process_group

    @functools.wraps(theirs)
    def destroy(group: ProcessGroup | None = None) -> None:
        try:
            if dist.is_initialized() and group in (None, dist.group.WORLD):
                for callback in list(_at_end):
                    callback()
        finally:  # whatever a callback raises, the group does not stay
            theirs(group)

    destroy.gradwire_is_told = True  # type: ignore[attr-defined]
    for module in (dist, dist.distributed_c10d):
        vars(module)["destroy_process_group"] = destroy
