"""Contenders take turns in the same processes, so that what disturbs one disturbs all.

A round times each contender once. Every sample begins at a barrier and counts for as long as its
slowest rank took. The order changes from round to round: each contender comes equally often in
each place, and after each of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from time import perf_counter

import torch
import torch.distributed as dist

__all__ = ["OURS", "alternate", "order", "repeated"]

OURS = "gradwire"
"""The name of our contender; the others are peers, or parts of the work that both share."""


def alternate(
    steps: Mapping[str, Callable[[], object]],
    rounds: int,
    *,
    warmup: int = 3,
    in_series: bool = False,
) -> dict[str, list[float]]:
    """Seconds of each contender in each round, the slowest rank's; equal on all ranks.

    Args:
        steps: Function of each contender that is timed for one sample.
        rounds: Timed rounds, >= 1.
        warmup: Rounds before them that are not timed.
        in_series: If True, an untimed step of the same contender precedes each sample. Needed where
            a step's time depends on the messages sent before it.
    """
    names = list(steps)
    taken: dict[str, list[float]] = {name: [] for name in names}
    for number in range(-warmup, rounds):
        for name in order(names, number):
            if in_series:
                steps[name]()
            dist.barrier()
            start = perf_counter()
            steps[name]()
            elapsed = perf_counter() - start
            if number >= 0:
                taken[name].append(elapsed)
    slowest = torch.tensor([taken[name] for name in names], dtype=torch.float64)
    if dist.get_world_size() > 1:  # a single rank may have a backend without CPU tensors
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return dict(zip(names, slowest.tolist(), strict=True))


def repeated(call: Callable[[], object], times: int) -> Callable[[], None]:
    """A step that makes a call several times."""

    def step() -> None:
        for _ in range(times):
            call()

    return step


def order(names: Sequence[str], number: int) -> list[str]:
    """The contenders' order in a round, a row of a square in which neighbours differ.

    Source:
        E. J. Williams, Experimental designs balanced for the estimation of residual effects of
        treatments, 1949.
    """
    count = len(names)
    cycle, turn = divmod(number, count)
    # first, second, last, third, last but one, …: each row of the square adds one
    zigzag = [i // 2 + 1 if i % 2 else -(i // 2) for i in range(count)]
    row = [names[(place + turn) % count] for place in zigzag]
    return row[::-1] if cycle % 2 else row
