"""How long something takes on a group: all ranks begin together, and the slowest one counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter, sleep

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

__all__ = ["ENOUGH_SECONDS", "Meter", "agree_on_largest", "device_of"]

ENOUGH_SECONDS = 0.1
"""What takes so long is not repeated."""
PRODUCTS = 20
WIDTH = 192
"""Of the matrices that are multiplied beside a collective."""


class Meter:
    """Times what every rank of a group does.

    Args:
        group: The group.
        some: Seconds for which something is repeated to be measured; at least twice. The mean
            counts: ranks that share cores have them by turns.

    Attributes:
        group: The group.
        some: The seconds.
        device: Where it communicates.
        product: Seconds that a unit of computing takes while all ranks compute.
    """

    def __init__(self, group: ProcessGroup, some: float) -> None:
        self.group, self.some = group, some
        self.device = device_of(group)
        unit = max(1e-6, self.timed(self.multiplying(PRODUCTS)) / PRODUCTS)
        many = max(PRODUCTS, round(some / unit))
        self.product = max(1e-6, self.mean(self.multiplying(many)) / many)

    def computing(self, seconds: float) -> Callable[[], None]:
        """Some computing that takes about so long."""
        return self.multiplying(max(1, round(seconds / self.product)))

    def multiplying(self, times: int) -> Callable[[], None]:
        """Some computing: products of matrices that stay in a core's cache."""
        a = torch.ones(WIDTH, WIDTH, device=self.device)

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
        if first >= ENOUGH_SECONDS:
            return first
        times = max(2, round(self.some / max(first, 1e-6)))
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
        agree_on_largest(self.group, [0.0])
        taken = []
        for _ in range(times):
            if rest > 0:
                sleep(rest)
            start = perf_counter()
            call()
            if self.device.type != "cpu":
                torch.ones(1, device=self.device).item()
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
