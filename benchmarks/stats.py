"""Medians, quartiles and ratios of samples that were taken in rounds.

A ratio compares what was measured in the same round, so that a disturbance that lasts for a round
cancels. Its interval comes from drawing the rounds again, with replacement (the bootstrap of
Efron, 1979).
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median, quantiles

__all__ = ["Estimate", "Spread", "difference_ratio", "geometric_mean", "ratio", "scaled", "spread"]

RESAMPLES = 2000
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Spread:
    """The median of samples and the quartiles around it."""

    median: float
    lower: float
    upper: float


@dataclass(frozen=True)
class Estimate:
    """A value, and the interval that holds it in 95 of 100 repetitions."""

    value: float
    low: float
    high: float


def spread(samples: Sequence[float]) -> Spread:
    """The quartiles of at least one sample."""
    if len(samples) == 1:
        return Spread(samples[0], samples[0], samples[0])
    lower, middle, upper = quantiles(samples, n=4, method="inclusive")
    return Spread(middle, lower, upper)


def scaled(samples: Mapping[str, Sequence[float]], factor: float) -> dict[str, list[float]]:
    """Each contender's samples in another unit."""
    return {name: [sample * factor for sample in taken] for name, taken in samples.items()}


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> Estimate:
    """The median over rounds of ours over theirs."""
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    return _bootstrap(lambda rounds: median(ratios[i] for i in rounds), len(ratios))


def difference_ratio(
    ours: Sequence[float], theirs: Sequence[float], base: Sequence[float]
) -> Estimate:
    """Ours over theirs, each the median over rounds of its distance from the base.

    A round's own ratio would be useless here: its denominator, a small difference, may be near 0.
    Even the median's is of use only where theirs is clearly above the base.
    """
    ours_above = [a - b for a, b in zip(ours, base, strict=True)]
    theirs_above = [a - b for a, b in zip(theirs, base, strict=True)]

    def statistic(rounds: Sequence[int]) -> float:
        return median(ours_above[i] for i in rounds) / median(theirs_above[i] for i in rounds)

    return _bootstrap(statistic, len(base))


def geometric_mean(values: Sequence[float]) -> float:
    """The geometric mean of positive values."""
    return math.exp(math.fsum(math.log(value) for value in values) / len(values))


def _bootstrap(statistic: Callable[[Sequence[int]], float], rounds: int) -> Estimate:
    """A statistic of rounds' numbers, and its interval; the same numbers give the same interval."""
    generator = random.Random(0)
    repeated = sorted(
        statistic(generator.choices(range(rounds), k=rounds)) for _ in range(RESAMPLES)
    )
    tail = int(RESAMPLES * (1 - CONFIDENCE) / 2)
    return Estimate(statistic(range(rounds)), repeated[tail], repeated[-1 - tail])
