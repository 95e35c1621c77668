"""The collectives of a group, measured: the same numbers on all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from threading import Thread
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, Work

from gradwire.cost_model import Cluster, Collective, Curve, fit_link

__all__ = ["agree_on_largest", "measure_cluster"]

SIZES = (1 << 10, 1 << 15, 1 << 18, 1 << 20, 1 << 22, 1 << 24)
"""Bytes of the largest tensor of a collective: what a rank gives, or gets."""
SOME_SECONDS = 0.06
"""How long something is repeated to be measured; at least twice. The mean counts."""
BEFORE_SECONDS = 0.01
"""How long ranks compute before each collective that is measured, as in a step.

Right after another one it takes half as long: threads are awake, and ranks come at the same time.
"""
ENOUGH_SECONDS = 0.1
"""A message that takes so long says enough; a larger one need not be sent."""
PRODUCTS = 20
WIDTH = 192
"""Of the matrices that are multiplied beside a collective."""


def measure_cluster(
    group: ProcessGroup, collectives: Sequence[Collective] = ("all_reduce",)
) -> Cluster:
    """What collectives on the group cost: every rank calls, and gets the same.

    Each takes a few messages of each size, from 1 KiB up to 16 MiB or until one takes 0.1 s, each
    after some computing, as in a step. Then some of the smallest and the largest are sent beside
    as much computing, which shows what that loses by them.

    Args:
        group: At least two ranks.
        collectives: Which.

    Example:
        >>> from gradwire.testing import run_ranks
        >>> def main():
        ...     cluster = measure_cluster(dist.group.WORLD)
        ...     return cluster.measured["all_reduce"].seconds(1 << 20), cluster.spare
        >>> first, second = run_ranks(main, world_size=2)
        >>> first == second
        True
    """
    product = _product_seconds(group)
    first: Collective = "all_reduce"
    names = list(dict.fromkeys((first, *collectives)))
    curves: dict[str, Curve] = {name: _curve(group, name, product) for name in names}
    taken: dict[str, Curve] = {n: _taken(group, n, curves[n], product) for n in names}
    points = [(int(nbytes), seconds) for nbytes, seconds in curves[first].points]
    link = fit_link(group.size(), points)
    return Cluster(group.size(), link, curves, taken, _spare(group, product))


def _curve(group: ProcessGroup, name: Collective, product: float) -> Curve:
    points: list[tuple[float, float]] = []
    before = _multiplying(group, max(1, round(BEFORE_SECONDS / product)))
    computing, least = _mean(group, before), 1e-9
    for given in _sizes(name, group.size()):
        start = _starter(group, name, given)

        def step(start: Callable[[], Work | None] = start) -> None:
            before()
            _wait(start())

        # more bytes do not take less, whatever the noise says
        least = max(least, _mean(group, step) - computing)
        points.append((given, least))
        if least >= ENOUGH_SECONDS and len(points) > 1:
            break
    return Curve(tuple(points))


def _sizes(name: Collective, world: int) -> list[int]:
    """Bytes that a rank gives; with many ranks, some are rounded up to the same."""
    unit = 4 * world if name == "all_to_all" else 4
    shares = (nbytes // world if name == "all_gather" else nbytes for nbytes in SIZES)
    return list(dict.fromkeys(max(1, math.ceil(share / unit)) * unit for share in shares))


def _starter(group: ProcessGroup, name: Collective, nbytes: int) -> Callable[[], Work | None]:
    """Starts a collective of tensors of which a rank gives so many bytes, as hooks start them."""
    own = torch.zeros(nbytes // 4, device=_device(group))
    others: dict[str, Any] = {"group": group, "async_op": True}
    if name == "all_reduce":
        return lambda: dist.all_reduce(own, **others)
    if name == "all_to_all":
        into = torch.empty_like(own)
        return lambda: dist.all_to_all_single(into, own, **others)
    received = list(own.new_empty(group.size(), len(own)).unbind())
    return lambda: dist.all_gather(received, own, **others)


def _wait(work: Work | None) -> None:
    assert work is not None
    work.get_future().then(lambda done: done.value()).wait()


def _mean(group: ProcessGroup, call: Callable[[], object]) -> float:
    """Of a call, repeated for a while: ranks that share cores have them by turns."""
    first = _timed(group, call)  # which may have memory to touch
    if first >= ENOUGH_SECONDS:
        return first
    times = max(2, round(SOME_SECONDS / max(first, 1e-6)))

    def repeat() -> None:
        for _ in range(times):
            call()

    return _timed(group, repeat) / times


def _timed(group: ProcessGroup, call: Callable[[], object]) -> float:
    """Seconds of a call, the slowest rank's; all begin together."""
    device = _device(group)
    agree_on_largest(group, [0.0])
    start = perf_counter()
    call()
    if device.type != "cpu":
        torch.ones(1, device=device).item()
    return agree_on_largest(group, [perf_counter() - start])[0]


def _multiplying(group: ProcessGroup, times: int) -> Callable[[], None]:
    """Some computing: products of matrices that stay in a core's cache."""
    a = torch.ones(WIDTH, WIDTH, device=_device(group))

    def multiply() -> None:
        for _ in range(times):
            torch.mm(a, a)

    return multiply


def _product_seconds(group: ProcessGroup) -> float:
    some = max(1e-6, _mean(group, _multiplying(group, PRODUCTS)) / PRODUCTS)
    many = max(PRODUCTS, round(SOME_SECONDS / some))
    return max(1e-6, _mean(group, _multiplying(group, many)) / many)


def _taken(group: ProcessGroup, name: Collective, curve: Curve, product: float) -> Curve:
    """What the smallest and the largest of these collectives take from computing beside them."""
    points = []
    for nbytes, seconds in (curve.points[0], curve.points[-1]):
        start = _starter(group, name, int(nbytes))
        multiply = _multiplying(group, max(1, round(seconds / product)))

        def both(start: Any = start, multiply: Any = multiply) -> None:
            work = start()
            multiply()
            _wait(work)

        points.append((nbytes, max(0.0, _mean(group, both) - _mean(group, multiply))))
    return Curve(tuple(points))


def _spare(group: ProcessGroup, product: float) -> float:
    """How much of a second thread's computing costs the first one nothing."""
    multiply = _multiplying(group, max(1, round(SOME_SECONDS / product)))

    def both() -> None:
        other = Thread(target=multiply)
        other.start()
        multiply()
        other.join()

    alone = _mean(group, multiply)
    return min(1.0, max(0.0, 2 - _mean(group, both) / alone))


def agree_on_largest(group: ProcessGroup, numbers: Sequence[float]) -> list[float]:
    """The largest of each over ranks."""
    every = torch.tensor(numbers, dtype=torch.float64, device=_device(group))
    dist.all_reduce(every, dist.ReduceOp.MAX, group=group)
    return every.tolist()


def _device(group: ProcessGroup) -> torch.device:
    cpu = torch.device("cpu")
    return cpu if cpu in group._device_types else group._device_types[0]
