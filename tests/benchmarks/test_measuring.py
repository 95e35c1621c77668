"""Contenders take turns in a balanced order; statistics have known answers."""

from __future__ import annotations

import random
from collections import Counter
from functools import partial
from itertools import pairwise, permutations
from statistics import median
from unittest.mock import patch

import pytest
import torch.distributed as dist
from benchmarks import alternate
from benchmarks.stats import difference_ratio, ratio

from gradwire.testing import run_ranks


@pytest.mark.parametrize("names", ["abcd", "abcde", "abcdef"])
def test_each_comes_as_often_after_each_other(names: str) -> None:
    rounds = [alternate.order(names, number) for number in range(2 * len(names))]
    for place in zip(*rounds, strict=True):
        assert Counter(place) == dict.fromkeys(names, 2)
    followers = Counter(pair for order in rounds for pair in pairwise(order))
    assert followers == dict.fromkeys(permutations(names, 2), 2)


def test_each_sample_is_the_slowest_ranks() -> None:
    def ranks() -> tuple[dict[str, list[float]], int]:
        now, calls = 0.0, 0

        def pass_time(name: str) -> None:
            nonlocal now, calls
            calls += 1
            # rank 0 is slow in a, rank 1 in b; each call takes a little longer than the last
            slow = (name == "a") == (dist.get_rank() == 0)
            now += (100 if slow else 1) + calls

        steps = {name: partial(pass_time, name) for name in ("a", "b")}
        with patch.object(alternate, "perf_counter", lambda: now):
            taken = alternate.alternate(steps, 2, warmup=2)
        return taken, calls

    for taken, calls in run_ranks(ranks):
        assert calls == 8  # two rounds that do not count, and two that do
        # the order of the timed rounds is a, b and then b, a
        assert taken == {"a": [105.0, 108.0], "b": [106.0, 107.0]}


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
