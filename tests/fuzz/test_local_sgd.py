"""Random runs of LocalSGD: parameters are those of the naive run.

`python tests/fuzz --local-sgd N` runs more of them.
"""

from __future__ import annotations

import pytest

from fuzz.local_sgd import make_plan, run_many


@pytest.mark.timeout(120)
@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_random_runs(backend):
    assert run_many(map(make_plan, range(20)), backend) == {}


@pytest.mark.wide
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_many_random_runs(backend):
    assert run_many(map(make_plan, range(100, 300)), backend) == {}
