"""Predictions, compared with calculations by hand and with all choices."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwire.errors import ArgumentError
from gradwire.tuning.cost_model import (
    Cluster,
    Cost,
    Curve,
    Link,
    Message,
    choose,
    collective_seconds,
    end_of_step,
    fit_link,
    undisturbed,
)
from gradwire.tuning.cost_model.timeline import _Clock

SLOW = Cluster(4, Link(1e-3, 1e6))
sizes = st.floats(0, 1e7)
links = st.builds(Link, st.floats(0, 0.1), st.floats(1e3, 1e11))


@pytest.mark.parametrize(
    ("message", "want"),
    [
        (Message("all_reduce", 4e6), 6 * (1e-3 + 1.0)),
        (Message("all_gather", 4e6), 3 * (1e-3 + 4.0)),
        (Message("all_to_all", 4e6), 3 * (1e-3 + 1.0)),
    ],
)
def test_collectives_step_by_step(message, want):
    assert collective_seconds(message, SLOW) == pytest.approx(want)
    assert collective_seconds(message, Cluster(1, SLOW.link)) == 0


@settings(deadline=None)
@given(links, st.integers(2, 4096), st.integers(0, 10**5), st.integers(10**6, 10**8))
def test_fit_link_recovers_a_link(link, ranks, small, large):
    cluster = Cluster(ranks, link)
    samples = [(n, collective_seconds(Message("all_reduce", n), cluster)) for n in (small, large)]
    if samples[1][1] - samples[0][1] > 1e-6 * samples[1][1]:
        found = fit_link(ranks, samples)
        for nbytes, seconds in samples:
            again = collective_seconds(Message("all_reduce", nbytes), Cluster(ranks, found))
            assert again == pytest.approx(seconds, rel=1e-4, abs=1e-9)


def test_a_link_faster_than_the_clock():
    assert fit_link(2, [(1, 1e-5), (10**6, 1e-5)]).bandwidth > 1e12
    with pytest.raises(ArgumentError, match="two sizes"):
        fit_link(2, [(1, 1e-5), (1, 1e-5)])


def plain(nbytes):
    return Cost(0.0, (Message("all_reduce", nbytes),), single=True)


def test_backward_hides_communication():
    cluster = Cluster(2, Link(0.0, 1e6))
    assert end_of_step([1.0, 5.0], [plain(2e6), plain(1e6)], cluster) == 6.0
    assert end_of_step([], [], cluster) == 0.0


def test_a_hook_of_several_collectives_delays_the_next_launch():
    cluster = Cluster(2, Link(0.0, 1e6))
    two = Cost(0.5, (Message("all_reduce", 1e6), Message("all_reduce", 1e6)), after=0.25)
    # launched at 1, sent at 1.5, back at 3.75: backward, at 2, waits for it, and ends at 5.75
    assert end_of_step([1.0, 2.0, 4.0], [two, plain(0), plain(0)], cluster) == 5.75


def test_measured_times_are_preferred_to_the_links():
    curve = Curve(((1e3, 0.5), (2e3, 1.0)))
    cluster = Cluster(4, SLOW.link, {"all_gather": curve})
    for nbytes, seconds in ((0, 0.5), (1e3, 0.5), (1.5e3, 0.75), (2e3, 1.0), (4e3, 2.0)):
        assert collective_seconds(Message("all_gather", nbytes), cluster) == seconds
    sums = Message("all_reduce", 1e6)
    assert collective_seconds(sums, cluster) == collective_seconds(sums, SLOW)
    assert Curve(((1, 5.0), (2, 1.0))).seconds(100) == 0  # not less


@pytest.mark.parametrize(("taken", "end"), [(0, 5.0), (1, 6.0), (2, 7.0), (4, 9.0)])
def test_time_that_a_collective_takes_from_backward(taken, end):
    # launched at 2; it takes 2 s, in which backward has 3 s of work, and then nothing is sent
    curve = Curve(((0, 0.0), (2e6, taken)))
    cluster = Cluster(2, Link(0.0, 1e6), taken={"all_reduce": curve})
    assert end_of_step([2.0, 5.0], [plain(2e6), plain(0)], cluster) == pytest.approx(end)
    # backward has ended before it: they share the time until then in proportion
    shared = 2 + 1 * (1 + taken / 2) + 1
    assert end_of_step([2.0, 3.0], [plain(2e6), plain(0)], cluster) == pytest.approx(shared)


@pytest.mark.parametrize(("spare", "end"), [(1.0, 6.0), (0.5, 6.5), (0.0, 7.0)])
def test_computing_of_a_hook_during_backward(spare, end):
    hook = Cost(1.0, (Message("all_reduce", 0),), after=1.0, single=True)
    cluster = Cluster(2, Link(0.0, 1e6), spare=spare)
    # before its message in backward's thread, afterwards in another one
    assert end_of_step([2.0, 5.0], [hook, plain(0)], cluster) == pytest.approx(end)


def test_two_concurrent_collectives_take_time_from_backward_in_order():
    taken = {"all_reduce": Curve(((0, 0.0), (1e6, 1.0)))}
    cluster = Cluster(2, Link(0.0, 1e6), taken=taken)
    # of 4 s of backward after the second launch, 2 s are beside messages and take 4 s
    ends = end_of_step([1.0, 1.0, 5.0], [plain(1e6), plain(1e6), plain(0)], cluster)
    assert ends == pytest.approx(1 + 4 + 2)


@settings(deadline=None)
@given(st.lists(st.floats(0, 3), min_size=1, max_size=4), st.floats(0, 3), st.floats(0, 0.5))
def test_undisturbed_recovers_backward_from_launch_times(gaps, taken, packs):
    cluster = Cluster(2, Link(0.0, 1e6), taken={"all_reduce": Curve(((0, 0.0), (1e6, taken)))})
    cost = Cost(packs, (Message("all_reduce", 1e6),), single=True)
    clock, launched = _Clock(), []
    for gap in [0.0, *gaps]:
        clock.compute(gap)
        clock.compute(packs)
        launched.append(clock.now)
        clock.start(cost.in_flight(cluster))
    found = undisturbed(launched, [cost] * len(launched), cluster)
    assert found == pytest.approx(list(itertools.accumulate(gaps, initial=0.0)), abs=1e-6)


@pytest.mark.parametrize("seconds", [5e-324, 1e-320, 1e-300, 0.1])
def test_tiny_times_terminate(seconds):
    cluster = Cluster(2, Link(0.0, 1e6), taken={"all_reduce": Curve(((0, 0.0), (1e6, 3.0)))})
    clock = _Clock()
    clock.start(plain(1e6).in_flight(cluster))
    assert clock.computed(seconds) <= seconds


times = st.floats(0, 2)
costs = st.builds(
    Cost,
    times,
    st.lists(st.builds(Message, st.sampled_from(["all_reduce", "all_gather"]), sizes), max_size=2)
    .map(tuple),
    times,
    st.booleans(),
)  # fmt: skip


@settings(deadline=None)
@given(st.lists(times, min_size=1, max_size=3).map(sorted), links, st.data())
def test_a_choice_is_not_worse_than_any_for_all_and_never_than_plain(ready, link, data):
    many = st.lists(costs, min_size=len(ready), max_size=len(ready))
    candidates = {name: data.draw(many) for name in ("plain", "a", "b")}
    cluster = Cluster(3, link)
    found = choose(ready, candidates, cluster)

    def seconds(names):
        return end_of_step(ready, [candidates[n][i] for i, n in enumerate(names)], cluster)

    assert found.seconds == seconds(found.names)
    assert found.plain_seconds == seconds(["plain"] * len(ready))
    alike = min(seconds([name] * len(ready)) for name in candidates)
    best = min(seconds(names) for names in itertools.product(candidates, repeat=len(ready)))
    assert best <= found.seconds * (1 + 1e-6)
    assert found.seconds <= alike * (1 + 1e-6)
    some = choose(ready, candidates, cluster, min_gain=0.5)
    assert some.names == ("plain",) * len(ready) or some.plain_seconds - some.seconds > 0.5


def test_choices_that_gain_too_little_are_not_made():
    fast = Cluster(2, Link(1e-6, 1e11))
    candidates = {"plain": [plain(26e6)], "int8": [Cost(0.01, (Message("all_to_all", 7e6),), 0.01)]}
    assert choose([0.0], candidates, fast).names == ("plain",)
    assert choose([0.0], candidates, Cluster(2, Link(1e-4, 1e7))).names == ("int8",)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Link(-1, 1),
        lambda: Link(0, 0),
        lambda: Cluster(0, SLOW.link),
        lambda: Cluster(2, SLOW.link, spare=1.5),
        lambda: Curve(((1, 1.0),)),
        lambda: Curve(((2, 1.0), (1, 1.0))),
    ],
)
def test_invalid_arguments(make):
    with pytest.raises(ArgumentError):
        make()
