"""Which of a few ways to reduce buckets is fastest: steps with each, by turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import TypeAlias

from torch.distributed import ProcessGroup

from gradwire.tuning.candidates import PLAIN
from gradwire.tuning.cost_model import Choice, Cluster, Cost, end_of_step
from gradwire.tuning.meter import agree_on_largest

Names: TypeAlias = tuple[str, ...]
"""The candidate of each bucket."""

TRY_GAIN = 0.02
"""The part of a step that a choice has to gain by prediction, or no other is tried."""
MIN_GAIN = 0.05
"""The part of a step that it has to gain in steps.

What is sent approximately has to be worth it; and steps differ by as much for other reasons.
"""
CLOSE = 1.3
"""What is predicted to take this much longer than the fastest may still be the fastest."""
CLOSE_PLAIN = 2.0
"""As `CLOSE`, for no hook: its steps are tried where they do not take too long."""
MOST = 4
"""How many are tried."""
STEPS = 6
"""How many steps of each a trial has; the first is not counted."""


def contenders(
    choice: Choice,
    ready: Sequence[float],
    costs: Mapping[str, Sequence[Cost]],
    cluster: Cluster,
    beside: float,
) -> list[Names]:
    """What may be the fastest, from what is predicted to be on; alone: it needs no trial.

    Args:
        choice: The fastest by prediction.
        ready: As `end_of_step` has it.
        costs: Of each candidate for each bucket.
        cluster: As `end_of_step` has it.
        beside: Seconds of a step that all have: forward and update.
    """
    plain = (PLAIN,) * len(ready)
    if choice.names == plain:
        return [plain]
    alike = {
        (name,) * len(ready): end_of_step(ready, of, cluster, idle=beside)
        for name, of in costs.items()
    }
    ends = {**alike, choice.names: choice.seconds}
    fastest = beside + choice.seconds

    def is_close(names: Names) -> bool:
        return beside + ends[names] <= fastest * (CLOSE_PLAIN if names == plain else CLOSE)

    close = sorted((names for names in ends if is_close(names)), key=lambda names: ends[names])
    if plain in close[MOST:]:
        close[MOST - 1] = plain
    return close[:MOST]


class Trial:
    """Steps with each of some contenders.

    Args:
        contenders: The candidate of each bucket; those of a bucket by its place.

    Attributes:
        present: The contender of this step.
    """

    def __init__(self, contenders: Sequence[Names]) -> None:
        self._seconds: dict[Names, list[float]] = {names: [] for names in contenders}
        self._order = list(contenders)
        self.present = self._order[0]

    def add(self, seconds: float) -> None:
        """A step of the present contender has taken so long; the next has its turn."""
        self._seconds[self.present].append(seconds)
        at = self._order.index(self.present) + 1
        self.present = self._order[at % len(self._order)]

    @property
    def is_over(self) -> bool:
        """Whether there are enough steps of each."""
        return all(len(taken) >= STEPS for taken in self._seconds.values())

    def medians(self) -> list[float]:
        """Of each contender, in their order."""
        return [median(taken[1:]) for taken in self._seconds.values()]

    def fastest(self, group: ProcessGroup, packing: float) -> tuple[Names, dict[Names, float]]:
        """The contender to take, the same on all ranks, and the seconds of each.

        Args:
            group: Whose ranks agree.
            packing: Seconds that a plain step took for having a hook at all.
        """
        agreed = agree_on_largest(group, self.medians())
        seconds = dict(zip(self._order, agreed, strict=True))
        best = min(seconds, key=lambda names: seconds[names])
        for names in seconds:
            if set(names) == {PLAIN}:
                seconds[names] -= packing
                if seconds[best] > (1 - MIN_GAIN) * seconds[names]:
                    best = names
        return best, seconds
