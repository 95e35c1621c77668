"""Assignment of shards to members, and the tree in which their sums are added."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire.elastic.shards import Speeds, assign, balance, check_shards, deal
from gradwire.elastic.tree_sum import add_up, nodes_of, push
from gradwire.errors import ArgumentError, ArgumentTypeError

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


def test_whole_subtrees_take_no_extra_bytes() -> None:
    for members in (1, 2, 4, 8):
        assert all(len(nodes_of(run)) == 1 for run in deal(8, members))
    assert [len(nodes_of(run)) for run in deal(8, 3)] == [2, 2, 1]


@pytest.mark.parametrize("shards", [0, -8, 6])
def test_a_number_of_shards_that_is_no_power_of_two(shards: int) -> None:
    with pytest.raises(ArgumentError, match=f"shards is {shards}: pass a power of two"):
        check_shards(shards)


@pytest.mark.parametrize("shards", [True, 8.0, "8"])
def test_shards_that_are_no_int(shards: object) -> None:
    with pytest.raises(ArgumentTypeError, match="shards is"):
        check_shards(shards)
