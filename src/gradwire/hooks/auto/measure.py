"""The link of a group, measured: the same numbers on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from gradwire.cost_model import Link, fit_link

__all__ = ["agree_on_largest", "measure_link"]

SMALL_BYTES = 1 << 10
SMALL_TIMES = 10
LARGE_BYTES = (1 << 18, 1 << 20, 1 << 22, 1 << 24)
ENOUGH_SECONDS = 0.1
"""A message that takes so long says enough; a larger one need not be sent."""


def measure_link(group: ProcessGroup) -> Link:
    """What an all_reduce on the group costs: every rank calls, and gets the same.

    A few messages of 1 KiB, then larger ones, up to 16 MiB or until one takes 0.1 s.

    Args:
        group: At least two ranks.

    Example:
        >>> from gradwire.testing import run_ranks
        >>> def main():
        ...     link = measure_link(dist.group.WORLD)
        ...     return link.latency, link.bandwidth
        >>> first, second = run_ranks(main, world_size=2)
        >>> first == second
        True
    """
    small = min(_seconds(group, SMALL_BYTES) for _ in range(SMALL_TIMES))
    samples = [(SMALL_BYTES, small)]
    for nbytes in LARGE_BYTES:
        large = _seconds(group, nbytes)
        if large < ENOUGH_SECONDS:  # the first of a size may have had memory to touch
            large = min(large, _seconds(group, nbytes))
        samples.append((nbytes, large))
        if large >= ENOUGH_SECONDS:
            break
    return fit_link(group.size(), samples)


def _seconds(group: ProcessGroup, nbytes: int) -> float:
    """Of one all_reduce, the slowest rank's."""
    tensor = torch.ones(nbytes // 4, device=_device(group))
    agree_on_largest(group, [0.0])  # all begin together
    start = perf_counter()
    dist.all_reduce(tensor, group=group)
    if tensor.device.type != "cpu":
        tensor[0].item()
    return agree_on_largest(group, [perf_counter() - start])[0]


def agree_on_largest(group: ProcessGroup, numbers: Sequence[float]) -> list[float]:
    """The largest of each over ranks."""
    every = torch.tensor(numbers, dtype=torch.float64, device=_device(group))
    dist.all_reduce(every, dist.ReduceOp.MAX, group=group)
    return every.tolist()


def _device(group: ProcessGroup) -> torch.device:
    cpu = torch.device("cpu")
    return cpu if cpu in group._device_types else group._device_types[0]
