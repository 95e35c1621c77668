"""Random programs around the wrapper; `python tests/fuzz --programs N` runs more."""

from __future__ import annotations

import pytest

from fuzz.programs import make_program, run_programs


def failures(seeds, backend):
    found = run_programs(map(make_program, seeds), backend)
    assert len(found) == len(seeds)
    return {seed: texts for seed, texts in found.items() if texts}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_programs_around_the_wrapper(backend):
    assert failures(range(8), backend) == {}


@pytest.mark.wide
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_many_programs_around_the_wrapper(backend):
    assert failures(range(100, 250), backend) == {}
