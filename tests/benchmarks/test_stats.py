"""The statistics, on samples whose answers are known."""

from __future__ import annotations

import random
from statistics import median

import pytest
from benchmarks.stats import Spread, difference_ratio, geometric_mean, ratio, spread


def test_spread_is_the_quartiles() -> None:
    assert spread([5.0, 1.0, 4.0, 2.0, 3.0]) == Spread(median=3.0, lower=2.0, upper=4.0)
    assert spread([7.0]) == Spread(7.0, 7.0, 7.0)


def test_what_disturbs_a_whole_round_cancels_in_the_ratio() -> None:
    theirs = [1.0, 9.0, 2.0, 70.0, 1.5, 3.0]
    estimate = ratio([t / 2 for t in theirs], theirs)
    assert (estimate.value, estimate.low, estimate.high) == (0.5, 0.5, 0.5)


def test_the_ratio_pairs_rounds() -> None:
    assert ratio([1.0, 4.0, 9.0], [1.0, 2.0, 3.0]).value == 2.0  # median of 1, 2, 3
    with pytest.raises(ValueError, match="zip"):
        ratio([1.0, 2.0], [1.0])


def test_difference_ratio_counts_from_the_base() -> None:
    base = [10.0, 20.0, 15.0, 12.0]
    ours, theirs = [b + 3 for b in base], [b + 4 for b in base]
    estimate = difference_ratio(ours, theirs, base)
    assert (estimate.value, estimate.low, estimate.high) == (0.75, 0.75, 0.75)


def test_the_interval_holds_the_true_ratio_about_as_often_as_it_says() -> None:
    generator = random.Random(1)
    held = 0
    for _ in range(50):
        theirs = [generator.lognormvariate(0, 0.2) for _ in range(21)]
        ours = [0.8 * generator.lognormvariate(0, 0.2) for _ in range(21)]
        estimate = ratio(ours, theirs)
        assert estimate.low < estimate.high
        assert estimate.value == median(a / b for a, b in zip(ours, theirs, strict=True))
        held += estimate.low <= 0.8 <= estimate.high
    assert 43 <= held <= 50


def test_geometric_mean() -> None:
    assert geometric_mean([0.25, 4.0]) == pytest.approx(1.0)
    assert geometric_mean([0.1, 0.2, 0.4]) == pytest.approx(0.2)
