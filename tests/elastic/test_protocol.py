"""The protocol of generations, through every order of events in small worlds."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.model import Model, Violated, search
from gradwire.elastic import protocol as p
from gradwire.elastic.shards import Speeds, assign, balance, deal
from gradwire.elastic.tree_sum import add_up, nodes_of, push

LONG = pytest.mark.skipif(os.environ.get("GRADWIRE_LONG") != "1", reason="GRADWIRE_LONG=1")


def test_two_members_of_which_one_may_die_anywhere() -> None:
    result = search(Model(members=2, crashes=1))
    assert result.worlds > 1000
    assert result.ends > 50  # the crash came at many places


@pytest.mark.wide
@pytest.mark.parametrize(
    ("model", "worlds"),
    [
        (Model(members=2, crashes=2, joiners=1, steps=1), 110_764),
        (Model(members=2, crashes=1, joiners=1), 59_708),
        (Model(members=3, crashes=2), 98_060),
        (Model(members=2, crashes=1, suspicions=1), 35_180),
        (Model(members=2, crashes=0, suspicions=2), 107_212),
        (Model(members=1, crashes=2, joiners=2, steps=1), 250_269),
        (Model(members=2, crashes=0, joiners=1, suspicions=1, steps=1), 247_177),
        pytest.param(Model(members=2, crashes=2, joiners=1), 276_060, marks=LONG),
        pytest.param(Model(members=2, crashes=1, suspicions=2), 377_484, marks=LONG),
        pytest.param(Model(members=3, crashes=2, joiners=1, steps=1), 4_056_915, marks=LONG),
    ],
)
@pytest.mark.timeout(7200)
def test_crashes_joins_and_false_suspicions(model: Model, worlds: int) -> None:
    result = search(model)
    assert result.worlds == worlds  # as the design notes have it: all orders, and none else
    assert result.ends > 50


ALL_STOP = ((1, 0), (2, 0), (3, 0))
"""All members ask to stop after the first step, of two."""


@pytest.mark.narrow({"model": Model(members=2, crashes=1, stops=ALL_STOP)})
@pytest.mark.parametrize(
    "model",
    [
        Model(members=2, crashes=1, stops=ALL_STOP),
        Model(members=2, crashes=1, stops=((1, 0),)),
        Model(members=2, crashes=1, joiners=1, stops=ALL_STOP),
        Model(members=2, crashes=1, joiners=1, stops=((2, 0),)),
        Model(members=2, crashes=1, suspicions=1, stops=((1, 0),)),
        Model(members=2, crashes=0, suspicions=2, stops=((2, 0),)),
        Model(members=3, crashes=1, stops=((1, 0),)),
        Model(members=1, crashes=1, joiners=1, steps=3, stops=((1, 1),)),
    ],
)
@pytest.mark.timeout(300)
def test_members_stop_at_the_same_step(model: Model) -> None:
    result = search(model)
    assert result.ends > 20


@pytest.mark.parametrize(
    ("forgotten", "found", "stops"),
    [("steps", "with another result", ((1, 0),)), ("complete", "have committed more", ())],
)
def test_a_rendezvous_that_forgets_what_a_member_reports_is_found(
    forgotten: str, found: str, stops: tuple[tuple[int, int], ...]
) -> None:
    def forgets(member: p.Member, event: p.Event) -> tuple[p.Member, tuple[p.Effect, ...]]:
        after, effects = p.transition(member, event)
        told = {"steps": member.steps} if forgotten == "steps" else {"complete": False}
        return after, tuple(
            replace(e, arrival=e.arrival._replace(**told)) if isinstance(e, p.Arrive) else e
            for e in effects
        )

    with pytest.raises(Violated, match=found):
        search(Model(members=3, crashes=1, stops=stops, transition=forgets))


def test_a_commit_without_the_barrier_is_found() -> None:
    def hasty(member: p.Member, event: p.Event) -> tuple[p.Member, tuple[p.Effect, ...]]:
        after, effects = p.transition(member, event)
        return p.transition(after, p.Passed(False)) if event == p.Reduced() else (after, effects)

    # three: the one that dies in the sum has one see it pass and one see it fail
    with pytest.raises(Violated, match="have committed more"):
        search(Model(members=3, crashes=1, transition=hasty))


def seen(
    before: p.Decision | None,
    *arrived: p.Arrival,
    gone: Iterable[int] = (),
    dead: Iterable[int] = (),
    finished: bool = False,
) -> p.Seen:
    return p.Seen(before, arrived, frozenset({*gone, *dead}), frozenset(dead), finished=finished)


BOTH = p.Decision(1, (1, 2), (1, 2), 0)
ONE = p.Decision(2, (1, 2), (1,), 5, former=(3,))
LATER = p.Decision(2, (1,), (1,), 5, former=(2,), source=1)
MINE, NEW = p.Arrival(1, 1, 0, False), p.Arrival(2, 0, 0, False)
ASLEEP = p.Arrival(2, 1, 57, True), p.Arrival(3, 0, 0, False)
OLD, LAST = p.Arrival(2, 1, 3, True), p.Arrival(2, 2, 5, True)


@pytest.mark.parametrize(
    ("seen", "closes", "is_over"),
    [
        # it waits for live members
        (seen(BOTH, MINE), False, False),
        (seen(BOTH, MINE, gone={2}), True, False),
        # without the state, it waits until its holders are dead
        (seen(ONE, NEW, gone={3}, dead={1}), False, False),
        (seen(ONE, NEW, dead={1, 3}), True, False),
        (seen(ONE, NEW, dead={1, 3}, finished=True), False, True),
        # a member that is suspended after its arrival still has the state: a new member began from
        # scratch without it, or took the run for over
        (seen(BOTH, *ASLEEP, gone={2}, dead={1}), False, False),
        (seen(BOTH, *ASLEEP, gone={2}, dead={1}, finished=True), False, False),
        (seen(BOTH, *ASLEEP, dead={1}), True, False),
        (seen(BOTH, *ASLEEP, dead={1}, finished=True), True, False),
        (seen(BOTH, *ASLEEP, dead={1, 2}), True, False),
        # a state of before is none when a member is done, which may come back
        (seen(LATER, OLD, gone={1}), True, False),
        (seen(LATER, OLD, gone={1}, finished=True), False, False),
        (seen(LATER, OLD, dead={1}, finished=True), False, True),
        (seen(LATER, LAST, gone={1}, finished=True), True, False),
    ],
)
def test_rendezvous_closes_or_is_over(seen: p.Seen, closes: bool, is_over: bool) -> None:
    assert (p.may_close(seen), p.is_over(seen)) == (closes, is_over)


def test_member_with_a_checkpoint_sends_it_to_the_others() -> None:
    decision = p.decide(1, seen(None, p.Arrival(1, 0, 0, False), p.Arrival(2, 0, 7, False)))
    assert decision == p.Decision(1, (2, 1), (2,), 7)


def test_stop_at_the_first_step_of_a_generation_binds_all_members() -> None:
    complete = p.Member(1, 9, p.Phase.BARRIER, 3, 1, True, 1, BOTH, stop=True)
    mine, other = (
        complete.arrival(),
        p.Member(2, 9, p.Phase.REDUCING, 3, 1, decision=BOTH).arrival(),
    )
    stopped = p.decide(2, seen(BOTH, mine, dead={2}))
    assert (stopped.committed, stopped.steps) == (4, 4)
    repeated = p.decide(2, seen(BOTH, mine, other))
    assert (repeated.committed, repeated.steps) == (3, 9)


def test_one_committed_and_the_others_can() -> None:
    decision = p.decide(2, seen(BOTH, p.Arrival(1, 1, 4, False), OLD))
    assert decision.committed == 4
    behind = p.Member(2, 9, p.Phase.ARRIVED, 3, 1, True, 2, BOTH)
    after, effects = p.transition(behind, p.Decided(decision))
    assert effects[0] == p.Commit(3)
    assert after.committed == 4


# -- assignment of shards to members, and the tree in which their sums are added


POWERS = st.integers(0, 6).map(lambda power: 1 << power)


def whole(first: int, size: int) -> str:
    """The additions below a node, written out."""
    if size == 1:
        return str(first)
    half = size // 2
    return f"({whole(first, half)}+{whole(first + half, half)})"


def plus(left: str, right: str) -> str:
    return f"({left}+{right})"


@given(POWERS, st.integers(1, 80))
def test_every_shard_is_dealt_once_in_order(shards: int, members: int) -> None:
    runs = deal(shards, members)
    assert [s for run in runs for s in run] == list(range(shards))
    lengths = [len(run) for run in runs]
    assert max(lengths) - min(lengths) <= 1


@given(POWERS, st.data())
def test_additions_are_the_same_however_shards_are_dealt(shards: int, data: st.DataObject) -> None:
    owners = data.draw(st.lists(st.integers(0, 4), min_size=shards, max_size=shards))
    values: dict[tuple[int, int], str] = {}
    for member in range(5):
        own = [shard for shard in range(shards) if owners[shard] == member]
        pending: list[tuple[tuple[int, int], str]] = []
        for shard in own:
            push(pending, (shard, 1), str(shard), plus)
        assert [node for node, _ in pending] == nodes_of(own)
        values.update(pending)
    assert add_up(shards, values, plus) == whole(0, shards)


@given(POWERS, st.data())
def test_results_are_used_by_a_member_that_holds_them(shards: int, data: st.DataObject) -> None:
    shard = st.integers(0, shards - 1)
    held = data.draw(st.lists(st.lists(shard, unique=True), min_size=1, max_size=6))
    assigned = assign(shards, held)
    assert sorted(itertools.chain(*assigned)) == list(range(shards))
    known = set(itertools.chain(*held))
    computed = []
    for own, holds in zip(assigned, held, strict=True):
        assert own == sorted(own)
        assert known & set(own) <= set(holds)
        computed.append(len(set(own) - known))
    assert max(computed) - min(computed) <= 1


@given(st.lists(st.tuples(st.integers(1, 16), st.floats(1e-3, 1e3)), min_size=1, max_size=6))
def test_balance_keeps_all_shards_and_makes_no_step_longer(
    members: list[tuple[int, float]],
) -> None:
    counts, seconds = [c for c, _ in members], [s for _, s in members]
    found = balance(counts, seconds)
    assert sum(found) == sum(counts)
    assert min(found) >= 1
    longest = max(c * s for c, s in zip(found, seconds, strict=True))
    assert longest <= max(c * s for c, s in zip(counts, seconds, strict=True))


def test_shards_stay_where_a_speed_is_unknown_or_shards_are_few() -> None:
    assert balance([4, 4], [math.nan, 1.0]) == [4, 4]
    assert balance([1, 1, 0], [1.0, 9.0, math.nan]) == [1, 1, 0]


def test_speeds_are_smoothed_and_decided_on_after_a_second() -> None:
    speeds = Speeds(2)
    speeds.note([0.1, math.nan], [4, 4])
    speeds.note([0.1, 0.1], [4, 4])
    assert speeds.decide([4, 4]) is None  # 0.8 s so far
    speeds.note([0.1, 0.5], [4, 4])  # the second member takes 0.3 s on average
    assert speeds.decide([4, 4]) == [6, 2]
    assert speeds.decide([6, 2]) is None
