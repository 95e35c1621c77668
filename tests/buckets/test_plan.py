"""The plan's rules, and that they are torch's."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from gradwire.buckets import plan_buckets
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


def _plan(tensors, caps, alone, indices=()):
    return plan_buckets(
        [t.numel() * t.element_size() for t in tensors],
        [t.dtype for t in tensors],
        [t.device for t in tensors],
        caps,
        alone=alone,
        indices=indices,
    )


@given(problems())
def test_equals_torch(problem):
    tensors, caps, alone = problem
    buckets, limits = dist._compute_bucket_assignment_by_size(tensors, caps, alone)
    plan = _plan(tensors, caps, alone)
    assert [list(b) for b in plan.buckets] == buckets
    assert list(plan.limits) == limits


@given(problems(), st.randoms())
def test_equals_torch_in_ready_order(problem, random):
    tensors, caps, alone = problem
    indices = list(range(len(tensors)))
    random.shuffle(indices)
    buckets, limits = dist._compute_bucket_assignment_by_size(tensors, caps, alone, indices)
    plan = _plan(tensors, caps, alone, indices)
    ours = sorted(zip([list(b) for b in plan.buckets], plan.limits, strict=True))
    # torch leaves the order of the last, unfilled buckets to a hash map
    assert ours == sorted(zip(buckets, limits, strict=True))


@given(problems())
def test_partitions_its_input(problem):
    tensors, caps, alone = problem
    plan = _plan(tensors, caps, alone)
    assert sorted(i for b in plan.buckets for i in b) == list(range(len(tensors)))


def test_a_bucket_closes_with_the_tensor_that_reaches_its_cap():
    plan = plan_buckets([60, 60, 60], ["f"] * 3, ["cpu"] * 3, caps=[100])
    assert plan.buckets == ((0, 1), (2,))
    assert plan.limits == (100, 100)


def test_caps_advance_for_each_dtype_apart():
    plan = plan_buckets([10, 10, 10, 10], ["f", "d", "f", "d"], ["cpu"] * 4, caps=[10, 50])
    assert plan.buckets == ((0,), (1,), (2,), (3,))
    assert plan.limits == (10, 10, 50, 50)


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
