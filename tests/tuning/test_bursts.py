"""Links that are faster after a rest, compared with a simulated token bucket."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwire.errors import ArgumentError
from gradwire.tuning.cost_model import (
    Burst,
    Cluster,
    Cost,
    Curve,
    Link,
    Message,
    end_of_step,
    find_burst,
)
from gradwire.tuning.cost_model.timeline import _Clock


class Tokens:
    """Token bucket that fills with bytes at a rate; sending a byte takes one."""

    def __init__(self, rate, size):
        self.rate, self.size, self.now, self._has = rate, size, 0.0, size

    def rest(self, seconds):
        self.now += seconds
        self._has = min(self.size, self._has + seconds * self.rate)

    def send(self, nbytes):
        seconds = max(0.0, nbytes - self._has) / self.rate
        self.rest(seconds) if seconds == 0 else self._wait(seconds)
        self._has -= nbytes
        return seconds

    def _wait(self, seconds):
        # while it waits, what comes goes out at once: the bucket does not overflow
        self.now += seconds
        self._has += seconds * self.rate


def cluster_of(rate, size):
    """Return the measured curve of such a link, after a rest."""
    rested = Curve(((0.0, 0.0), (max(size, 1e-3), 0.0)), 1 / rate)
    burst = Burst(size / rate, {"all_reduce": 1 / rate})
    return Cluster(2, Link(0.0, rate), {"all_reduce": rested}, burst=burst)


def sent(nbytes):
    return Cost(0.0, (Message("all_reduce", nbytes),), single=True)


rates, bursts = st.floats(1.0, 1e3), st.floats(0.1, 1e3)
amounts = st.floats(1e-2, 3e3)
parts = st.lists(st.tuples(st.floats(0, 1), amounts), min_size=1, max_size=3)


@settings(deadline=None)
@given(rates, bursts, st.lists(st.tuples(st.floats(0, 3), amounts), min_size=1, max_size=6))
def test_messages_and_rests_match_a_token_bucket(rate, size, steps):
    tokens, cluster = Tokens(rate, size), cluster_of(rate, size)
    clock = _Clock(cluster.burst)
    for rest, nbytes in steps:
        tokens.rest(rest)
        tokens.send(nbytes)
        clock.compute(rest)
        clock.start(sent(nbytes).in_flight(cluster))
        clock.wait()
        assert clock.now == pytest.approx(tokens.now, rel=1e-6, abs=1e-6)


@pytest.mark.wide
@settings(deadline=None)
@given(rates, bursts, parts, st.floats(0, 2))
def test_steps_with_idle_times_match_a_token_bucket(rate, size, buckets, idle):
    tokens, cluster = Tokens(rate, size), cluster_of(rate, size)
    ready = list(itertools.accumulate(gap for gap, _ in buckets))
    each = []
    for _ in range(400):
        began = tokens.now
        for when, (_, nbytes) in zip(ready, buckets, strict=True):
            tokens.rest(max(0.0, began + when - tokens.now))
            tokens.send(nbytes)
        each.append(tokens.now - began)
        tokens.rest(idle)
    costs = [sent(nbytes) for _, nbytes in buckets]
    found = end_of_step(ready, costs, cluster, idle=idle)
    assert end_of_step(ready, costs, cluster) == pytest.approx(each[0], rel=1e-6, abs=1e-6)
    # what is left after as many steps as are looked at is used up by little in each
    assert found >= each[0] - 1e-6
    assert found == pytest.approx(each[-1], rel=1e-4, abs=2 * size / rate / 20 + 1e-6)


@settings(deadline=None)
@given(rates, bursts, st.floats(0.3, 20), st.integers(3, 8))
def test_find_burst_recovers_the_credit(rate, size, part, count):
    nbytes = size / min(part, count / 2)  # it is used up in the first half
    tokens = Tokens(rate, size)
    each, credit = find_burst([tokens.send(nbytes) for _ in range(count)])
    assert each == pytest.approx(nbytes / rate)
    if size / nbytes > 0.26:
        assert credit == pytest.approx(size / rate, rel=1e-6)
    else:
        assert credit in (0.0, pytest.approx(size / rate))


@settings(deadline=None)
@given(st.lists(st.floats(1.0, 1.3), min_size=2, max_size=9))
def test_noise_is_not_taken_for_credit(times):
    assert find_burst(times)[1] == 0.0


def test_a_link_gains_credit_during_computing():
    cluster = cluster_of(rate=1.0, size=2.0)
    costs = [sent(2.0), sent(2.0), sent(0.0)]
    # the second finds none of the credit, half of it, or all
    assert [end_of_step([0, gap, gap], costs, cluster) for gap in (0.0, 1.0, 2.0)] == [2, 2, 2]
    assert end_of_step([0, 5, 5], costs, cluster) == 5
    # and in a step that follows others, the first does not either
    assert end_of_step([0, 0, 0], costs, cluster, idle=0.0) == 4
    assert end_of_step([0, 0, 0], costs, cluster, idle=1.0) == 3


@settings(deadline=None)
@given(st.floats(0, 10), st.floats(0, 10), st.floats(0, 10), st.floats(0, 1))
def test_missing_time_is_at_most_the_used_credit(credit, seconds, busy, part):
    missing = Burst(credit, {}).missing(seconds, busy, credit * part)
    assert 0 <= missing <= credit * (1 - part) + 1e-12
    assert Burst(credit, {}).missing(seconds, busy, credit) == 0


def test_invalid_arguments():
    with pytest.raises(ArgumentError, match="negative"):
        Burst(-1.0, {})
    with pytest.raises(ArgumentError, match="negative"):
        Burst(1.0, {"all_reduce": -1.0})
    with pytest.raises(ArgumentError, match="at least two"):
        find_burst([1.0])
