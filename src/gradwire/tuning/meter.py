"""How long something takes on a group: all ranks begin together, and the slowest one counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter, sleep

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

SOME_SECONDS = 0.06
"""How long something is repeated to be measured, after a first time; at least twice.

The mean counts: ranks that share cores have them by turns.
"""
ENOUGH_SECONDS, ENOUGH_AT_ONCE = 0.1, 0.03
"""What takes so long is not repeated; nor need what takes longer be sent."""
PRODUCTS = 20
WIDTH = 192
"""Of the matrices that are multiplied beside a collective."""


class Meter:
    """Times what every rank of a group does.

    Args:
        group: The group.
        thorough: Whether there is time to repeat things; else each is done twice.

    Attributes:
        group: The group.
        thorough: The same.
        enough: What takes so many seconds is not repeated; nor need what takes longer be sent.
        device: Where it communicates.
        product: Seconds that a unit of computing takes while all ranks compute.
    """

    def __init__(self, group: ProcessGroup, *, thorough: bool) -> None:
        self.group, self.thorough = group, thorough
        self.enough = ENOUGH_SECONDS if thorough else ENOUGH_AT_ONCE
        self.device = device_of(group)
        unit = max(1e-6, self.timed(self.multiplying(PRODUCTS)) / PRODUCTS)
        many = max(PRODUCTS, round(self.enough / 2 / unit))
        self.product = max(1e-6, self.mean(self.multiplying(many)) / many)

    def computing(self, seconds: float) -> Callable[[], None]:
        """Some computing that takes about so long."""
        return self.multiplying(max(1, round(seconds / self.product)))

    def multiplying(self, times: int) -> Callable[[], None]:
        """Some computing: products of matrices that stay in a core's cache."""
        a = torch.ones(WIDTH, WIDTH, dtype=torch.float32, device=self.device)

        def multiply() -> None:
            for _ in range(times):
                torch.mm(a, a)

        return multiply

    def mean(self, call: Callable[[], object], rest: float = 0.0) -> float:
        """Seconds of a call.

        Args:
            call: What.
            rest: For how long ranks sleep before each.
        """
        first = self.timed(call, rest)  # which may have memory to touch
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
        """Seconds of a call, once."""
        (seconds,) = self.each(call, 1, rest)
        return seconds

    def each(self, call: Callable[[], object], times: int, rest: float = 0.0) -> list[float]:
        """Seconds of each of some calls, one after another."""
        if self.thorough:
            agree_on_largest(self.group, [0.0])  # all begin together; else as the last has ended
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
    """The largest of each over ranks."""
    every = torch.tensor(numbers, dtype=torch.float64, device=device_of(group))
    dist.all_reduce(every, dist.ReduceOp.MAX, group=group)
    return every.tolist()


def device_of(group: ProcessGroup) -> torch.device:
    """Where it communicates: the CPU, if it can."""
    cpu = torch.device("cpu")
    return cpu if cpu in group._device_types else group._device_types[0]
