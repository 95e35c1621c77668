"""Collectives of tensors of any size, to be measured: sent as hooks send them."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil, inf
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, Work

from gradwire.cost_model import Collective
from gradwire.hooks.auto.meter import device_of

__all__ = ["SIZES", "bytes_of_largest", "sender", "sizes_of", "starter", "wait"]

SIZES = (1 << 10, 1 << 15, 1 << 18, 1 << 20, 1 << 22, 1 << 24)
"""Bytes of the largest tensor of a collective: what a rank gives, or gets."""


def bytes_of_largest(name: Collective, group: ProcessGroup) -> int:
    """Bytes of its largest tensor, for each that a rank gives."""
    return group.size() if name == "all_gather" else 1


def sizes_of(name: Collective, world: int, largest: float = inf) -> list[int]:
    """Bytes that a rank gives, at least two, up to the largest of interest.

    With many ranks, some are rounded up to the same.
    """
    unit = 4 * world if name == "all_to_all" else 4
    shares = (nbytes // world if name == "all_gather" else nbytes for nbytes in SIZES)
    found = list(dict.fromkeys(max(1, ceil(share / unit)) * unit for share in shares))
    if largest >= found[-1]:
        return found
    last = max(2, ceil(largest / unit)) * unit
    return [size for size in found if size < last] + [last] if last > found[0] else found[:2]


def starter(group: ProcessGroup, name: Collective, nbytes: int) -> Callable[[], Work | None]:
    """Starts a collective of tensors of which a rank gives so many bytes."""
    own = torch.zeros(nbytes // 4, device=device_of(group))
    others: dict[str, Any] = {"group": group, "async_op": True}
    if name == "all_reduce":
        return lambda: dist.all_reduce(own, **others)
    if name == "all_to_all":
        into = torch.empty_like(own)
        return lambda: dist.all_to_all_single(into, own, **others)
    received = list(own.new_empty(group.size(), len(own)).unbind())
    return lambda: dist.all_gather(received, own, **others)


def wait(work: Work | None) -> None:
    """Until it is done, with a future, as hooks do."""
    assert work is not None
    work.get_future().then(lambda done: done.value()).wait()


def sender(group: ProcessGroup, name: Collective, nbytes: int) -> Callable[[], None]:
    """Starts such a collective, and waits for it."""
    start = starter(group, name, nbytes)
    return lambda: wait(start())
