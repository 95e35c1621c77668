"""Contenders take turns in a balanced order, and the slowest rank's time counts."""

from __future__ import annotations

from collections import Counter
from functools import partial
from itertools import pairwise, permutations
from unittest.mock import patch

import pytest
import torch.distributed as dist
from benchmarks import alternate

from gradwire.testing import run_ranks


def test_two_contenders_take_turns_in_being_first() -> None:
    rounds = [alternate.order(["a", "b"], number) for number in range(4)]
    assert rounds == [["a", "b"], ["b", "a"], ["b", "a"], ["a", "b"]]


def test_three_contenders_meet_in_every_order() -> None:
    rounds = [tuple(alternate.order(["a", "b", "c"], number)) for number in range(6)]
    assert sorted(rounds) == sorted(permutations("abc"))
    followers = Counter(pair for order in rounds for pair in pairwise(order))
    assert set(followers.values()) == {2}


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


def test_in_series_each_sample_follows_one_like_it() -> None:
    def ranks() -> list[str]:
        called: list[str] = []
        steps = {name: partial(called.append, name) for name in ("a", "b")}
        taken = alternate.alternate(steps, 1, warmup=0, in_series=True)
        assert [len(seconds) for seconds in taken.values()] == [1, 1]
        return called

    assert run_ranks(ranks) == [["a", "a", "b", "b"]] * 2
