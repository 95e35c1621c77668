"""Random programs around the wrapper; `python tests/fuzz --programs N` runs more."""

from __future__ import annotations

import pytest

from fuzz.programs import make_program, run_programs


@pytest.mark.timeout(120)
@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_programs_around_the_wrapper(backend):
    assert run_programs(map(make_program, range(8)), backend) == {}


@pytest.mark.wide
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_many_programs_around_the_wrapper(backend):
    assert run_programs(map(make_program, range(100, 250)), backend) == {}
