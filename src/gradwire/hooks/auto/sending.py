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

__all__ = ["SIZES", "sender", "sizes_of", "starter", "wait"]

SIZES = (1 << 10, 1 << 15, 1 << 18, 1 << 20, 1 << 22, 1 << 24)
"""Bytes of the largest tensor of a collective: what a rank gives, or gets."""


def sizes_of(name: Collective, world: int, largest: float = inf) -> list[int]:
    """Bytes that a rank gives, at least two, up to the largest of interest.

    With many ranks, some are rounded up to the same.
    """
    unit = 4 * world if name == "all_to_all" else 4

    def whole(nbytes: float) -> int:
        return max(1, ceil(nbytes / unit)) * unit

    shares = (nbytes // world if name == "all_gather" else nbytes for nbytes in SIZES)
    every = list(dict.fromkeys(whole(share) for share in shares))
    # two that are next to each other would differ by noise alone
    top = whole(max(every[1], min(every[-1], largest)))
    return [*(size for size in every if size < top), top]


def starter(group: ProcessGroup, name: Collective, nbytes: int) -> Callable[[], Work | None]:
    """Starts a collective of tensors of which a rank gives so many bytes."""
    # ones: their memory has been touched
    own = torch.ones(nbytes // 4, dtype=torch.float32, device=device_of(group))
    others: dict[str, Any] = {"group": group, "async_op": True}
    if name == "all_reduce":
        return lambda: dist.all_reduce(own, **others)
    if name == "all_to_all":
        into = torch.ones_like(own)
        return lambda: dist.all_to_all_single(into, own, **others)
    received = list(own.new_ones(group.size(), len(own)).unbind())
    return lambda: dist.all_gather(received, own, **others)


def wait(work: Work | None) -> None:
    """Until it is done, with a future, as hooks do."""
    assert work is not None
    work.get_future().then(lambda done: done.value()).wait()


def sender(group: ProcessGroup, name: Collective, nbytes: int) -> Callable[[], None]:
    """Starts such a collective, and waits for it."""
    start = starter(group, name, nbytes)
    return lambda: wait(start())
