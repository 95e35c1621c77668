"""Fragments of the parameters, and the steps in which they are exchanged."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gradwire.local_sgd.outer import assign_fragments, due


@given(st.lists(st.integers(0, 9), min_size=1, max_size=12), st.data())
def test_fragments_are_a_partition_in_order(sizes, data):
    count = data.draw(st.integers(1, len(sizes)))
    runs = assign_fragments(sizes, count)
    assert [i for run in runs for i in run] == list(range(len(sizes)))
    assert len(runs) == count
    assert all(runs)


@given(st.integers(1, 40), st.data())
def test_each_fragment_is_due_once_in_every_steps(every, data):
    fragments = data.draw(st.integers(1, every))
    for begin in (1, 1 + every):
        turns = [f for step in range(begin, begin + every) for f in due(step, every, fragments)]
        assert turns == list(range(fragments))
