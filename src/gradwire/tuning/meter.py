"""Timing on a group: all ranks start together, and the slowest rank's time counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter, sleep

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

SOME_SECONDS = 0.06
"""Duration of repeated calls in a measurement, after a first call. There are at least two.

The result is the mean, because ranks may share cores.
"""
ENOUGH_SECONDS, ENOUGH_AT_ONCE = 0.1, 0.03
"""Measurements longer than this are not repeated, and larger messages are skipped.

The second value is for measurements that are not thorough.
"""
PRODUCTS = 20
WIDTH = 192
"""Size of the square matrices that are multiplied during a collective."""


class Meter:
    """Timer of calls that every rank of a group makes.

    Args:
        group: Process group.
        thorough: True to repeat calls; False to call each twice.

    Attributes:
        group: Process group.
        thorough: See Args.
        enough: Seconds above which calls are not repeated and larger messages are skipped.
        device: Device of the group's tensors.
        product: Seconds of a unit of computing while all ranks compute.
    """

    def __init__(self, group: ProcessGroup, *, thorough: bool) -> None:
        self.group, self.thorough = group, thorough
        self.enough = ENOUGH_SECONDS if thorough else ENOUGH_AT_ONCE
        self.device = device_of(group)
        unit = max(1e-6, self.timed(self.multiplying(PRODUCTS)) / PRODUCTS)
        many = max(PRODUCTS, round(self.enough / 2 / unit))
        self.product = max(1e-6, self.mean(self.multiplying(many)) / many)

    def computing(self, seconds: float) -> Callable[[], None]:
        """Return a function that computes for about this long."""
        return self.multiplying(max(1, round(seconds / self.product)))

    def multiplying(self, times: int) -> Callable[[], None]:
        """Return a function that multiplies matrices that stay in a core's cache."""
        a = torch.ones(WIDTH, WIDTH, dtype=torch.float32, device=self.device)

        def multiply() -> None:
            for _ in range(times):
                torch.mm(a, a)

        return multiply

    def mean(self, call: Callable[[], object], rest: float = 0.0) -> float:
        """Return the mean seconds of a call.

        Args:
            call: Function to time.
            rest: Seconds that ranks sleep before each call.
        """
        first = self.timed(call, rest)  # may include page faults
        if first >= self.enough:
            return first
        if not self.thorough:
            return (first + self.timed(call, rest)) / 2
        times = max(2, round(SOME_SECONDS / max(first, 1e-6)))
        if rest > 0:
            return sum(self.each(call, times, rest)) / times

        def repeat() -> None:
            for _ in range(times):
                call()

        return self.timed(repeat) / times

    def timed(self, call: Callable[[], object], rest: float = 0.0) -> float:
        """Return the seconds of a single call."""
        (seconds,) = self.each(call, 1, rest)
        return seconds

    def each(self, call: Callable[[], object], times: int, rest: float = 0.0) -> list[float]:
        """Return the seconds of each of several calls in a row."""
        if self.thorough:
            # a barrier; without it, ranks start when their previous measurement has ended
            agree_on_largest(self.group, [0.0])
        taken = []
        for _ in range(times):
            if rest > 0:
                sleep(rest)
            start = perf_counter()
            call()
            if self.device.type != "cpu":
                torch.ones(1, dtype=torch.int32, device=self.device).item()
            taken.append(perf_counter() - start)
        return agree_on_largest(self.group, taken)


def agree_on_largest(group: ProcessGroup, numbers: Sequence[float]) -> list[float]:
    """Return the maximum over ranks of each number."""
    every = torch.tensor(numbers, dtype=torch.float64, device=device_of(group))
    dist.all_reduce(every, dist.ReduceOp.MAX, group=group)
    return every.tolist()


def device_of(group: ProcessGroup) -> torch.device:
    """Return the device of a group's tensors, the CPU if supported."""
    cpu = torch.device("cpu")
    return cpu if cpu in group._device_types else group._device_types[0]
