"""The plan's rules, and that they are torch's."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from gradwire.buckets import plan_buckets
from gradwire.compat.comm_hooks import _compute_bucket_assignment_by_size as ours
from gradwire.errors import ArgumentError

DTYPES = [torch.float32, torch.float64, torch.float16, torch.int64]


@st.composite
def problems(draw: st.DrawFn):
    n = draw(st.integers(1, 24))
    numels = draw(st.lists(st.integers(0, 400), min_size=n, max_size=n))
    dtypes = draw(st.lists(st.sampled_from(DTYPES), min_size=n, max_size=n))
    caps = draw(st.lists(st.integers(1, 3000), min_size=1, max_size=4))
    alone = draw(st.one_of(st.just([]), st.lists(st.booleans(), min_size=n, max_size=n)))
    return [torch.empty(k, dtype=d) for k, d in zip(numels, dtypes, strict=True)], caps, alone


@given(problems())
def test_equals_torch(problem):
    assert ours(*problem) == dist._compute_bucket_assignment_by_size(*problem)


@given(problems(), st.randoms())
def test_equals_torch_in_ready_order(problem, random):
    tensors, caps, alone = problem
    indices = list(range(len(tensors)))
    random.shuffle(indices)
    found = ours(tensors, caps, alone, indices)
    expected = dist._compute_bucket_assignment_by_size(tensors, caps, alone, indices)
    # torch leaves the order of the last, unfilled buckets to a hash map
    assert sorted(zip(*found, strict=True)) == sorted(zip(*expected, strict=True))


@given(problems())
def test_partitions_its_input(problem):
    tensors, caps, alone = problem
    buckets, _ = ours(tensors, caps, alone)
    assert sorted(i for b in buckets for i in b) == list(range(len(tensors)))


def test_devices_are_kept_apart():
    assert plan_buckets([1, 1], ["f"] * 2, ["cpu", "cuda"], caps=[9]).buckets == ((0,), (1,))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1], [], ["cpu"], [9]), "dtypes has 0 entries"),
        (([1], ["f"], [], [9]), "devices has 0 entries"),
        (([1], ["f"], ["cpu"], []), "caps is"),
        (([1], ["f"], ["cpu"], [0]), "caps is"),
        (([-1], ["f"], ["cpu"], [1]), "negative"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ArgumentError, match=message):
        plan_buckets(*arguments)


def test_bad_alone_and_indices():
    with pytest.raises(ArgumentError, match="alone has 1"):
        plan_buckets([1, 1], ["f"] * 2, ["cpu"] * 2, [9], alone=[True])
    with pytest.raises(ArgumentError, match="indices has 2"):
        plan_buckets([1, 1], ["f"] * 2, ["cpu"] * 2, [9], indices=[0, 0])
