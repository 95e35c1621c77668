"""Random models: gradients are the naive average, and nothing else is written to.

`python tests/fuzz` runs more of them, or one of them, and makes one that fails small.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from itertools import count, islice

import pytest

from fuzz.plan import Plan, make_plan
from fuzz.run import run_many
from fuzz.shrink import shown, shrink

SMALL = 10_000
"""Elements of a parameter: buckets of all kinds but those that travel in place."""


def small_plans() -> Iterator[Plan]:
    """Cases that take little time: between two ranks, with small parameters."""
    plans = map(make_plan, count())
    return (p for p in plans if p.ranks == 2 and p.shape[0] * p.shape[1] < SMALL)


def assert_all_pass(plans, backend):
    """Run cases; say which fail, and how to look at one."""
    plans = list(plans)
    tally = run_many(plans, backend)
    failures = [
        f"python tests/fuzz --seed {seed} --backends {backend}: {problems[0][:300]}"
        for seed, problems in tally.failed.items()
    ]
    assert not failures, "\n".join(failures)
    assert tally.ran >= 0.7 * len(plans), tally.invalid


@pytest.mark.timeout(300)
@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_random_models(backend):
    assert_all_pass(islice(small_plans(), 12), backend)


@pytest.mark.wide
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_many_random_models(backend):
    last = 1300 if os.environ.get("GRADWIRE_LONG") == "1" else 1120
    assert_all_pass(map(make_plan, range(1000, last)), backend)


def test_a_failing_case_is_made_small():
    """Down to the one line that makes it fail."""

    def fails(case):
        return any("conj" in op.kind for op in case.ops)

    found = next(p for p in map(make_plan, range(1000)) if len(p.ops) > 3 and fails(p))
    small = shrink(replace(found, hooks=()), fails)
    assert [op.kind for op in small.ops] == ["conj"]
    assert len(small.steps) == 1
    assert not small.options
    assert "self.p" in shown(small, "gloo")
