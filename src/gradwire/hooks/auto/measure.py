"""The collectives of a group, measured: the same numbers on all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, Work

from gradwire.cost_model import Cluster, Collective, Curve, fit_link

__all__ = ["agree_on_largest", "measure_cluster"]

SIZES = (1 << 10, 1 << 15, 1 << 18, 1 << 20, 1 << 22, 1 << 24)
"""Bytes of the largest tensor of a collective: what a rank gives, or gets."""
TIMES = 3
"""How often each size is measured; the median counts."""
ENOUGH_SECONDS = 0.1
"""A message that takes so long says enough; a larger one need not be sent."""
PRODUCTS = 20
WIDTH = 192
"""Of the matrices that are multiplied beside a collective."""


def measure_cluster(
    group: ProcessGroup, collectives: Sequence[Collective] = ("all_reduce",)
) -> Cluster:
    """What collectives on the group cost: every rank calls, and gets the same.

    Each takes a few messages of each size, from 1 KiB up to 16 MiB or until one takes 0.1 s. Then
    one is sent beside some computing, which shows what they take from each other.

    Args:
        group: At least two ranks.
        collectives: Which.

    Example:
        >>> from gradwire.testing import run_ranks
        >>> def main():
        ...     cluster = measure_cluster(dist.group.WORLD)
        ...     return cluster.measured["all_reduce"].seconds(1 << 20), cluster.overlap
        >>> first, second = run_ranks(main, world_size=2)
        >>> first == second
        True
    """
    curves: dict[str, Curve] = {
        name: _curve(group, name) for name in dict.fromkeys(("all_reduce", *collectives))
    }
    sums = curves["all_reduce"]
    link = fit_link(group.size(), [(int(nbytes), seconds) for nbytes, seconds in sums.points])
    return Cluster(group.size(), link, curves, _overlap(group, sums))


def _curve(group: ProcessGroup, name: Collective) -> Curve:
    points: list[tuple[float, float]] = []
    for given in _sizes(name, group.size()):
        call = _call(group, name, given)
        # the first of a size may have memory to touch
        first = _seconds(group, call)
        times = [] if first >= ENOUGH_SECONDS else [_seconds(group, call) for _ in range(TIMES)]
        points.append((given, median(times or [first])))
        if first >= ENOUGH_SECONDS and len(points) > 1:
            break
    return Curve(tuple(points))


def _sizes(name: Collective, world: int) -> list[int]:
    """Bytes that a rank gives; with many ranks, some are rounded up to the same."""
    unit = 4 * world if name == "all_to_all" else 4
    shares = (nbytes // world if name == "all_gather" else nbytes for nbytes in SIZES)
    return list(dict.fromkeys(max(1, math.ceil(share / unit)) * unit for share in shares))


def _call(group: ProcessGroup, name: Collective, nbytes: int) -> Callable[[], object]:
    """One collective of tensors of which a rank gives so many bytes, as hooks start them."""
    own = torch.zeros(nbytes // 4, device=_device(group))
    others: dict[str, Any] = {"group": group, "async_op": True}
    if name == "all_reduce":
        return lambda: _wait(dist.all_reduce(own, **others))
    if name == "all_to_all":
        into = torch.empty_like(own)
        return lambda: _wait(dist.all_to_all_single(into, own, **others))
    received = list(own.new_empty(group.size(), len(own)).unbind())
    return lambda: _wait(dist.all_gather(received, own, **others))


def _wait(work: Work | None) -> None:
    assert work is not None
    work.get_future().then(lambda done: done.value()).wait()


def _seconds(group: ProcessGroup, call: Callable[[], object]) -> float:
    """Of one call, the slowest rank's."""
    device = _device(group)
    agree_on_largest(group, [0.0])  # all begin together
    start = perf_counter()
    call()
    if device.type != "cpu":
        torch.ones(1, device=device).item()
    return agree_on_largest(group, [perf_counter() - start])[0]


def _overlap(group: ProcessGroup, curve: Curve) -> float:
    """Which part of the time of a collective and of computing is saved by doing both at once."""
    nbytes, sending = curve.points[-1]
    device = _device(group)
    a, tensor = torch.ones(WIDTH, WIDTH, device=device), torch.zeros(int(nbytes) // 4).to(device)

    def multiply(times: int) -> None:
        for _ in range(times):
            torch.mm(a, a)

    def both(times: int) -> None:
        work = dist.all_reduce(tensor, group=group, async_op=True)
        multiply(times)
        assert work is not None
        work.wait()

    some = _seconds(group, partial(multiply, PRODUCTS))
    times = max(PRODUCTS, round(PRODUCTS * sending / max(some, 1e-6)))
    computing = median(_seconds(group, partial(multiply, times)) for _ in range(TIMES))
    together = median(_seconds(group, partial(both, times)) for _ in range(TIMES))
    saved = (computing + sending - together) / max(min(computing, sending), 1e-9)
    return min(1.0, max(0.0, saved))


def agree_on_largest(group: ProcessGroup, numbers: Sequence[float]) -> list[float]:
    """The largest of each over ranks."""
    every = torch.tensor(numbers, dtype=torch.float64, device=_device(group))
    dist.all_reduce(every, dist.ReduceOp.MAX, group=group)
    return every.tolist()


def _device(group: ProcessGroup) -> torch.device:
    cpu = torch.device("cpu")
    return cpu if cpu in group._device_types else group._device_types[0]
