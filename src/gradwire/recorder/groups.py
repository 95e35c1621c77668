"""Names and ranks of torch.distributed's groups, and the end of the default group.

Launchers may kill their processes after `destroy_process_group()` of the default group, as Ray does
with its actors. Exit handlers do not run then, so `at_end_of_job` hooks into that call.
"""

from __future__ import annotations

import contextlib
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
    """Group of torch.distributed."""

    def __init__(self, name: str, desc: str, ranks: list[int], group: Any) -> None:
        # `ranks`: global ranks, in the order of their ranks in the group
        self.name, self.desc, self.ranks = name, desc, ranks
        # weak reference, since names are reused
        self.reference = reference_to(group)
        # the default group at that time; None if there was none
        world = dist.group.WORLD
        self.world = None if world is None else weakref.ref(world)

    def count(self) -> int | None:
        """Return the number of collectives that torch recorded on this group; None if unknown."""
        group = self.reference()
        if group is None:
            return None
        with contextlib.suppress(RuntimeError):
            if type(group) is ProcessGroup:  # not an shm group
                # each backend has its own count
                several = len({group._get_backend(d) for d in group._device_types}) > 1
                return None if several else _sequence_number(group)
            return 0
        return None


def _sequence_number(group: ProcessGroup) -> int:
    return int(group._get_sequence_number_for_group())  # type: ignore[attr-defined]


def reference_to(group: Any) -> weakref.ref[Any]:
    """Return a weak reference that stays a usable dict key after the group is deleted."""
    reference = weakref.ref(group)
    hash(reference)  # cached in the reference
    return reference


class RecordedGroup:
    """Group of a backend, whose name is looked up once torch.distributed has registered it."""

    def __init__(self, backend: object) -> None:
        # a backend, or a process group written in Python
        self._backend = weakref.ref(backend)
        self._info: GroupInfo | None = None
        self._tries = 0
        # True if the name is known or is no longer looked up
        self.named = False

    def find_name(self) -> GroupInfo | None:
        """Look up the group in torch.distributed."""
        if self._info is None:
            self._tries += 1
            backend = self._backend()
            for group, name in list(dist.distributed_c10d._world.pg_names.items()):
                if backend is not None and (group is backend or _backend_for_cpu(group) is backend):
                    this_rank()
                    self._info = _note(group, name)
                    break
            self.named = self._info is not None or self._tries >= _TRIES
        return self._info


def known_groups() -> dict[str, GroupInfo]:
    """Return the groups in torch.distributed, and those known from earlier calls."""
    world = dist.distributed_c10d._world
    for group, name in list(world.pg_names.items()):
        _note(group, name)  # overwrites: names are reused
    return {name: info for name, info in list(_known.items()) if in_this_world(info)}


def info_of(group: ProcessGroup | None) -> GroupInfo | None:
    """Return the name and ranks of a group; None if torch.distributed does not know it."""
    name = dist.distributed_c10d._world.pg_names.get(group) if group is not None else None
    return None if name is None else _note(group, name)


def in_this_world(info: GroupInfo) -> bool:
    """Return True if a group belongs to the current default group, not to an earlier job."""
    # without a default group, True: a dump then shows the last job
    return not dist.is_initialized() or info.world is None or info.world() is dist.group.WORLD


def number_of_last(group: ProcessGroup | None) -> int:
    """Return the number of a group's last collective; 0 on shm, which records it in its entries."""
    with contextlib.suppress(RuntimeError):  # a backend that does not count
        # shm groups are instances of subclasses
        return _sequence_number(group) if type(group) is ProcessGroup else 0
    return 0


def this_rank() -> int | None:
    """Return this process's global rank; None if unknown. It outlives the default group."""
    if dist.is_initialized():
        _rank[:] = [dist.get_rank()]
    return _rank[0] if _rank else None


def _backend_for_cpu(group: Any) -> object:
    cpu = torch.device("cpu")
    try:
        if cpu not in group._device_types:
            return None
        found = group._get_backend(cpu)
    except (AttributeError, RuntimeError):  # not a member, or a group written in Python
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
    """Register a function to call whenever the default group is about to be destroyed."""
    if not hasattr(dist.destroy_process_group, "gradwire_calls_back"):
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
        finally:  # destroy the group even if a callback raises
            theirs(group)

    destroy.gradwire_calls_back = True  # type: ignore[attr-defined]
    for module in (dist, dist.distributed_c10d):
        vars(module)["destroy_process_group"] = destroy
