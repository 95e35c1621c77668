"""Number of shards of each member by its measured speed."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from operator import mul

BALANCE_SECONDS = 1.0
"""Time of the slowest member in shards between two decisions."""
clock = time.perf_counter


class Speeds:
    """Time of each member for a shard, over the steps of a generation.

    All members note the same values, so that they decide alike.

    Args:
        members: Number of members.
    """

    def __init__(self, members: int) -> None:
        self._seconds = [math.nan] * members
        self._slowest = 0.0
        self._began = 0.0
        self._own: list[float] = []

    def begin(self) -> None:
        """Note that this member begins a shard."""
        self._began = clock()

    def end(self) -> None:
        """Note that this member has completed the shard."""
        self._own.append(clock() - self._began)

    def take(self) -> float:
        """Return this member's mean time for a shard of this step; NaN if it computed none."""
        own, self._own = self._own, []
        return sum(own) / len(own) if own else math.nan

    def note(self, seconds: Sequence[float], counts: Sequence[int]) -> None:
        """Take in the times of all members in a step.

        Args:
            seconds: Time of each member for a shard.
            counts: Number of shards of each member.
        """
        pairs = zip(self._seconds, seconds, strict=True)
        self._seconds = [_smooth(before, now) for before, now in pairs]
        times = [c * s for c, s in zip(counts, seconds, strict=True) if s > 0]
        self._slowest += max(times, default=0.0)

    def decide(self, counts: Sequence[int]) -> list[int] | None:
        """Return other numbers of shards if they make steps shorter, else None."""
        if self._slowest < BALANCE_SECONDS:
            return None
        self._slowest = 0.0
        found = balance(counts, self._seconds)
        return None if found == list(counts) else found


def _smooth(before: float, now: float) -> float:
    if math.isnan(now):
        return before
    return now if math.isnan(before) else (before + now) / 2


def balance(counts: Sequence[int], seconds: Sequence[float]) -> list[int]:
    """Return the number of shards of each member that makes the slowest member fastest.

    Each member keeps at least one shard, so that its speed is known. The numbers stay as they are
    if the step would get less than 10 % shorter, or if there are fewer shards than members.

    Args:
        counts: Present number of shards of each member.
        seconds: Time of each member for one shard; NaN if unknown.

    Example:
        >>> balance([4, 4], [1.0, 3.0])
        [6, 2]
        >>> balance([4, 4], [1.0, 1.1])
        [4, 4]
    """
    if 0 in counts or not all(second > 0 for second in seconds):
        return list(counts)
    found = [1] * len(counts)
    for _ in range(sum(counts) - len(counts)):
        found[min(range(len(found)), key=lambda m: ((found[m] + 1) * seconds[m], m))] += 1
    before, after = (max(map(mul, c, seconds)) for c in (counts, found))
    return found if after < 0.9 * before else list(counts)
