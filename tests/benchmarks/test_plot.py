"""The chart shows the committed results."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.__main__ import main
from benchmarks.plot import bars, in_words
from benchmarks.report import conditions
from benchmarks.results import Result
from benchmarks.tables import PLOT, RESULTS
from click.testing import CliRunner


def test_the_chart_of_the_repository_shows_the_results_that_are_kept() -> None:
    result, svg = Result.read(RESULTS / "ddp_shm.json"), PLOT.read_text(encoding="utf-8")
    assert f">{conditions(result)}<" in svg
    assert f">{in_words(result)}<" in svg


def test_the_same_results_give_the_same_bytes() -> None:
    result = Result.read(RESULTS / "ddp_shm.json")
    assert bars(result) == bars(result)


def test_a_group_of_bars_for_each_case_and_a_bar_for_each_contender() -> None:
    result = Result.read(RESULTS / "ddp_shm.json")
    svg = bars(result)
    for text in (*(case.name for case in result.cases), "gradwire on shm", "torch on Gloo"):
        assert svg.count(f">{text}</text>") == 1
    assert ">no communication<" not in svg


def test_the_command_draws(tmp_path: Path) -> None:
    svg = tmp_path / "chart.svg"
    assert CliRunner().invoke(main, ["plot", "--svg", str(svg)]).exit_code == 0
    assert svg.read_text(encoding="utf-8").startswith("<?xml")


@pytest.mark.parametrize("name", ["ddp_none", "../ddp"])
def test_results_that_are_not_there_are_an_error(name: str) -> None:
    run = CliRunner().invoke(main, ["plot", name])
    assert run.exit_code == 2
    assert "there are no results" in run.output
