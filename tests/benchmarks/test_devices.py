"""The benchmark of devices: each kind of case runs from end to end, and checks its contenders."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from benchmarks import devices, devices_gpu
from benchmarks.__main__ import main
from benchmarks.options import Options
from benchmarks.report import conditions
from benchmarks.results import Result
from click.testing import CliRunner


def tiny() -> list[torch.Tensor]:
    return [torch.empty(8, 8), torch.empty(3), torch.empty(1 << 16)]


@pytest.mark.wide
def test_from_end_to_end() -> None:
    options = Options(rounds=2, world_size=1)
    cases = [
        devices.Case("add", partial(devices._adding, 4, 1), "any"),
        devices.Case("add many", partial(devices._adding_many, 4, tiny), "any"),
        devices.Case("copy many", partial(devices._broadcasting, 2, tiny), "any"),
        devices.Case("copy nothing", partial(devices._broadcasting, 1, tiny), "any"),
    ]
    results = devices.measure(cases, options)
    contenders = ["gradwire", "torch", "torch, one device", "copying in place"]
    found = [list(case.measures[0].contenders) for case in results]
    assert found == [contenders, contenders, [*contenders[:2], contenders[3]], contenders[:2]]
    for case in results:
        assert all(math.isfinite(e.value) for e in case.measures[0].ratios.values())
    assert conditions(Result.of("devices", options, results)).startswith("one process, 2 rounds, ")


def test_a_wrong_result_is_found_out() -> None:
    with pytest.raises(AssertionError, match=r"lazy's result 1 of shape \(3,\) is wrong"):
        devices._check("lazy", [torch.ones(2), torch.zeros(3)], [torch.ones(2), torch.ones(3)])


def test_there_are_no_ranks_to_choose() -> None:
    result = CliRunner().invoke(main, ["devices", "--world-size", "2"])
    assert result.exit_code == 2
    assert "No such option" in result.output


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_the_gpu_benchmark_says_that_there_is_none() -> None:
    result = CliRunner().invoke(main, ["devices_gpu"])
    assert result.exit_code == 1
    assert result.output == "Error: there is no CUDA device here\n"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_the_gpu_benchmark_from_end_to_end() -> None:
    cases = [
        devices.Case("scatter", partial(devices_gpu._scattering, 1), "any"),
        devices.Case("gather", partial(devices_gpu._gathering, 1), "any"),
        devices.Case("add", partial(devices_gpu._adding, 3, 1), "any"),
    ]
    results = devices_gpu.measure(cases, Options(rounds=2, world_size=1))
    assert [list(c.measures[0].contenders) for c in results] == [["gradwire", "bare copy"]] * 3
