"""Random programs with wrappers in several groups; `python tests/fuzz --groups N` runs more."""

from __future__ import annotations

import pytest

from fuzz.groups import make_groups_plan, run_groups_plan


@pytest.mark.parametrize("backend", ["gloo", "shm"])
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.narrow({"seed": 0, "backend": "gloo"}, {"seed": 1, "backend": "shm"})
def test_wrappers_in_several_groups(seed, backend):
    assert not run_groups_plan(make_groups_plan(seed), backend)
