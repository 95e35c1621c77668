"""Who runs which shards, and the tree in which their sums are added."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire.elastic.training.samples import check_shards, deal
from gradwire.elastic.training.tree import add_up, nodes_within, push
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
    cuts = sorted(data.draw(st.sets(st.integers(0, shards))) | {0, shards})
    values: dict[tuple[int, int], str] = {}
    for start, stop in itertools.pairwise(cuts):
        pending: list[tuple[tuple[int, int], str]] = []
        for shard in range(start, stop):
            push(pending, (shard, 1), str(shard), plus)
        assert [node for node, _ in pending] == nodes_within(range(start, stop))
        values.update(pending)
    assert add_up(shards, values, plus) == whole(0, shards)


def test_whole_subtrees_take_no_extra_bytes() -> None:
    for members in (1, 2, 4, 8):
        assert all(len(nodes_within(run)) == 1 for run in deal(8, members))
    assert [len(nodes_within(run)) for run in deal(8, 3)] == [2, 2, 1]


@pytest.mark.parametrize("shards", [0, -8, 6])
def test_a_number_of_shards_that_is_no_power_of_two(shards: int) -> None:
    with pytest.raises(ArgumentError, match=f"shards is {shards}: pass a power of two"):
        check_shards(shards)


@pytest.mark.parametrize("shards", [True, 8.0, "8"])
def test_shards_that_are_no_int(shards: object) -> None:
    with pytest.raises(ArgumentTypeError, match="shards is"):
        check_shards(shards)
