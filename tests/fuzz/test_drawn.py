"""Drawn models and programs: results are those of the references, and nothing else is written.

hypothesis makes a case that fails small, and runs it first the next time. `python tests/fuzz` runs
many more of each kind.
"""

from __future__ import annotations

import os
import random

import pytest
from hypothesis import HealthCheck, Phase, assume, given, note, settings
from hypothesis import strategies as st

from fuzz.kinds import KINDS

FEW = {"small-models": 12, "programs": 8, "groups": 2, "collectives": 20, "local-sgd": 15}
MANY = {"models": 120, "programs": 150, "groups": 12, "collectives": 300, "local-sgd": 200}


def check(kind: str, backend: str, count: int, *, derandomize: bool) -> None:
    @settings(
        max_examples=count,
        derandomize=derandomize,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[phase for phase in Phase if phase is not Phase.explain],
    )
    @given(st.randoms(use_true_random=False))
    def run(rng: random.Random) -> None:
        case = KINDS[kind].draw(rng)
        note(KINDS[kind].show(case))
        ((_, problem),) = KINDS[kind].run([case], backend)
        assume(not problem.startswith("invalid"))
        assert not problem, problem

    run()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("backend", ["gloo", "shm"])
@pytest.mark.parametrize("kind", FEW)
def test_some(kind: str, backend: str) -> None:
    check(kind, backend, FEW[kind], derandomize=True)


@pytest.mark.wide
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("backend", ["gloo", "shm"])
@pytest.mark.parametrize("kind", MANY)
def test_many(kind: str, backend: str) -> None:
    more = 3 if os.environ.get("GRADWIRE_LONG") == "1" else 1
    check(kind, backend, MANY[kind] * more, derandomize=False)


def test_a_case_that_fails_is_made_small() -> None:
    """Down to the one operation that makes it fail."""
    kind, found = KINDS["collectives"], []

    @settings(max_examples=300, derandomize=True, database=None, deadline=None)
    @given(st.randoms(use_true_random=False))
    def run(rng: random.Random) -> None:
        case = kind.draw(rng)
        if any(step.op == "halo_exchange" for step in case.steps):
            found.append(case)
            raise ValueError("found")

    with pytest.raises(ValueError, match="found"):
        run()
    assert [step.op for step in found[-1].steps] == ["halo_exchange"]
    assert "halo_exchange(x, widths=" in kind.show(found[-1])
