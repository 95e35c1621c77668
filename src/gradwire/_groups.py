"""Resolve arguments to a process group, a rank and its store, gather values, destroy groups."""

from __future__ import annotations

import _thread
import atexit
import ctypes
import time
from collections.abc import Callable
from datetime import timedelta
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, finalize

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, Store

from gradwire._processes import wait_until
from gradwire.errors import (
    ArgumentError,
    ArgumentTypeError,
    CollectiveTimeoutError,
    NotSupportedError,
    PeerLostError,
)

_STORES: WeakKeyDictionary[ProcessGroup, Store] = WeakKeyDictionary()
"""Stores of groups that were made without torch.distributed's own functions."""
_BACKENDS: set[finalize[..., Any]] = set()
"""Finalizers of `destroy_in_thread` whose backends are not destroyed yet."""


OBSERVERS: list[Callable[..., Any]] = []
"""Functions through which `collectives` calls groups: with a method's name, it, and arguments."""
WEIGHTS: WeakSet[Any] = WeakSet()
"""Weights that `ddp` applies at the end of backward, and `collectives` where it is exchanged."""
COMPARED_CALLS: WeakKeyDictionary[ProcessGroup, count[int]] = WeakKeyDictionary()
"""Number of calls of `collectives` that a group's ranks have compared."""
EXIT_SECONDS = 2.0

_TEMPORARY: WeakSet[ProcessGroup] = WeakSet()
"""Groups of elastic runs, which replace them."""


def check_group(group: object, name: str = "group") -> ProcessGroup:
    """Return the group if this rank is a member of it."""
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


def mark_temporary(group: ProcessGroup) -> None:
    """Note that an elastic run will replace a group."""
    _TEMPORARY.add(group)


def check_lasting(group: ProcessGroup, name: str, user: str) -> None:
    """Raise if an elastic run will replace a group."""
    if group in _TEMPORARY:
        raise NotSupportedError(
            f"{name} is the group of an elastic run, which has another one in each generation: "
            f"{user} would go on with this one, alone. Use a group of init_process_group or "
            "new_group"
        )


def weight_of_backward() -> float:
    """Return the factor by which `ddp` multiplies the gradients of the running backward, or 1."""
    weights = {weight for w in WEIGHTS if (weight := w.of_backward()) is not None}
    if len(weights) > 1:
        raise NotSupportedError(
            f"wrapped modules have weights {sorted(weights)} in one backward in which ranks "
            "exchange cotangents: give them the same weight"
        )
    return weights.pop() if weights else 1.0


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


def default_group(name: str) -> ProcessGroup:
    """Return the default group, for an argument of this name that is None."""
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
    """Return the rank in the group for a global rank or a group rank; None if neither is given."""
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
    """Return the group's store; raise if it has none, with its use in the message."""
    store = find_store(group)
    if store is None:
        raise NotSupportedError(
            f"the group has no store, through which {use}: use a group that torch.distributed "
            "made with one (init_process_group or new_group; not MPI)"
        )
    return store


def destroy_in_thread(owner: object, backend: object) -> Callable[[], object]:
    """Destroy a backend on a thread when its owner is gone; return a function that does it now."""
    # The destructor of Gloo's backend joins threads, which may be in a collective until it times
    # out. It would otherwise run wherever the last reference is dropped: in the training loop,
    # usually. The backend is used through its owner alone, and the caller drops its own references
    # before the owner's. No thread destroys it when the interpreter exits.
    finalizer = finalize(owner, _start, box := [backend])
    finalizer.atexit = False
    box.append(finalizer)
    _BACKENDS.add(finalizer)
    return finalizer


def _start(box: list[Any]) -> None:
    """Empty a list on a thread: this one never holds the last reference, not even briefly."""
    try:
        # threading.Thread takes locks that this thread may hold, if garbage is being collected
        _thread.start_new_thread(_destroy, (box,))
    except RuntimeError:
        _leak(box)


def _destroy(box: list[Any]) -> None:
    finalizer = box.pop()
    box.clear()
    _BACKENDS.discard(finalizer)  # last: the interpreter waits for it when it exits


def _leak(box: list[Any]) -> None:
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(box[0]))


@atexit.register
def _leak_all() -> None:
    """Keep what is left: the interpreter would destroy it on the main thread while it exits."""
    # Wait up to 2 s for backends that are being destroyed. The process aborts if Python ends a
    # thread that needs the GIL in a destructor.
    wait_until(lambda: all(f.peek() for f in list(_BACKENDS)), EXIT_SECONDS, 0.001)
    for finalizer in list(_BACKENDS):
        if (found := finalizer.peek()) is not None:
            _leak(found[2][0])


def values_of_ranks(
    store: Store,
    key: str,
    count: int,
    doing: str,
    *,
    timeout: timedelta | None = None,
    check: Callable[[], None] = lambda: None,
    poll: float = 0.5,
) -> list[bytes]:
    """Return the values that the first `count` ranks set as "key/rank", read in one request."""
    # Only the group uses the store, whose timeout is the default and the most. While ranks are
    # missing, `check` is called every `poll` seconds; its exceptions propagate.
    if not count:
        return []
    keys = [f"{key}/{rank}" for rank in range(count)]
    of_store: timedelta = store.timeout  # type: ignore[attr-defined]  # torch's stub lacks it
    timeout = of_store if timeout is None else min(timeout, of_store)
    now, seconds, pause = time.monotonic(), timeout.total_seconds(), 1e-4
    deadline = now + max(seconds, 0.02)  # others may be a few ms behind
    next_check = now + poll
    try:
        while not store.check(keys):
            now = time.monotonic()
            if now > deadline:
                missing = [rank for rank in range(count) if not store.check([keys[rank]])]
                raise CollectiveTimeoutError(
                    f"ranks {missing} did not {doing} within {seconds:g} s"
                )
            if now >= next_check:
                check()
                next_check = now + poll
            # no wait of the store: a TCPStore's warns each time that its time is up
            time.sleep(pause)
            pause = min(2 * pause, 1e-2)
        return store.multi_get(keys)
    except dist.DistNetworkError as error:
        raise PeerLostError(
            f"the group's store does not answer (the rank that hosts it is gone): {error}"
        ) from error
