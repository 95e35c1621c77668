"""Trial of a few choices of hooks in training steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import TypeAlias

from torch.distributed import ProcessGroup

from gradwire.tuning.candidates import PLAIN
from gradwire.tuning.cost_model import Choice, Cluster, Cost, end_of_step
from gradwire.tuning.meter import agree_on_largest

Names: TypeAlias = tuple[str, ...]
"""Candidate of each bucket, by name."""

TRY_GAIN = 0.02
"""Minimum predicted gain for a trial, as a fraction of a step."""
MIN_GAIN = 0.05
"""Minimum measured gain for a choice, as a fraction of a step.

A smaller gain does not justify approximate gradients, and is within the variation of steps.
"""
CLOSE = 1.3
"""Factor of the fastest predicted time up to which choices are tried."""
CLOSE_PLAIN = 2.0
"""Same as `CLOSE`, for no hook."""
MOST = 4
"""Maximum number of contenders."""
STEPS = 6
"""Number of steps of each contender. The first is not counted."""


def contenders(
    choice: Choice,
    ready: Sequence[float],
    costs: Mapping[str, Sequence[Cost]],
    cluster: Cluster,
    beside: float,
) -> list[Names]:
    """Return the choices that may be the fastest, in order of predicted time.

    A single choice needs no trial.

    Args:
        choice: Choice with the shortest predicted time.
        ready: See `end_of_step`.
        costs: Costs of each candidate for each bucket.
        cluster: See `end_of_step`.
        beside: Seconds of forward and update.
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
    """Trial of several contenders, which alternate from step to step.

    Args:
        contenders: Choices to try.

    Attributes:
        current: Contender of this step.
    """

    def __init__(self, contenders: Sequence[Names]) -> None:
        self._seconds: dict[Names, list[float]] = {names: [] for names in contenders}
        self._order = list(contenders)
        self.current = self._order[0]

    def add(self, seconds: float) -> None:
        """Record the time of a step of the current contender, and continue with the next one."""
        self._seconds[self.current].append(seconds)
        at = self._order.index(self.current) + 1
        self.current = self._order[at % len(self._order)]

    @property
    def is_over(self) -> bool:
        """Return True if there are enough steps of each contender."""
        return all(len(taken) >= STEPS for taken in self._seconds.values())

    def medians(self) -> list[float]:
        """Return the median seconds of each contender's steps, in order."""
        return [median(taken[1:]) for taken in self._seconds.values()]

    def fastest(self, group: ProcessGroup, packing: float) -> tuple[Names, dict[Names, float]]:
        """Return the chosen contender, the same on all ranks, and the seconds of each.

        Args:
            group: Process group whose ranks agree.
            packing: Seconds that packing buckets for a hook added to steps without compression.
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
