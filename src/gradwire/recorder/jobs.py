"""When a job ends before its process does: with destroy_process_group() of the default group.

Launchers may kill their processes after that, as Ray does with its actors: nothing runs at exit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch.distributed as dist
from torch.distributed import ProcessGroup

__all__ = ["at_end_of_job", "not_at_end_of_job"]

_callbacks: list[Callable[[], None]] = []


def at_end_of_job(callback: Callable[[], None]) -> None:
    """Have something called each time before the default group is destroyed."""
    if not hasattr(dist.destroy_process_group, "gradwire_is_told"):
        _listen()
    _callbacks.append(callback)


def not_at_end_of_job(callback: Callable[[], None]) -> None:
    """Undo `at_end_of_job`."""
    _callbacks.remove(callback)


def _listen() -> None:
    theirs = dist.destroy_process_group

    @functools.wraps(theirs)
    def destroy(group: ProcessGroup | None = None) -> None:
        try:
            if dist.is_initialized() and group in (None, dist.group.WORLD):
                for callback in list(_callbacks):
                    callback()
        finally:  # whatever a callback raises, the group does not stay
            theirs(group)

    destroy.gradwire_is_told = True  # type: ignore[attr-defined]
    for module in (dist, dist.distributed_c10d):
        vars(module)["destroy_process_group"] = destroy
