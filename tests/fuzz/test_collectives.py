"""Random programs of collectives: values and gradients are those of the reference.

`python tests/fuzz --collectives N` runs more of them; `--collectives-seed S` makes one small.
"""

from __future__ import annotations

import pytest

from fuzz.collectives_plan import make_plan
from fuzz.collectives_run import run_many
from fuzz.collectives_shrink import shown, shrink


def assert_all_pass(seeds, backend):
    """Run seeds; say which fail, and how to look at one."""
    tally = run_many(map(make_plan, seeds), backend)
    failures = [
        f"python tests/fuzz --collectives-seed {seed} --backends {backend}: {problems[0][:300]}"
        for seed, problems in tally.failed.items()
    ]
    assert not failures, "\n".join(failures)
    assert tally.ran == len(seeds)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_random_programs(backend):
    # Without checkpoints, whose first use imports torch's compiler.
    plain = [s for s in range(20) if not any(step.checkpoint for step in make_plan(s).steps)]
    assert_all_pass(plain, backend)


@pytest.mark.wide
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_many_random_programs(backend):
    assert_all_pass(range(100, 400), backend)


def test_a_failing_program_is_made_small():
    """Down to the one step that makes it fail."""

    def fails(plan):
        return any(step.op == "halo_exchange" for step in plan.steps)

    found = next(p for p in map(make_plan, range(1000)) if len(p.steps) > 3 and fails(p))
    small = shrink(found, fails)
    assert [step.op for step in small.steps] == ["halo_exchange"]
    assert not small.twice
    assert len(small.leaves) == 1
    assert "halo_exchange(x, widths=" in shown(small, "gloo")
