"""Results survive their file, and tables and the chart show them."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks import tables
from benchmarks.__main__ import BENCHMARKS, main
from benchmarks.options import Options
from benchmarks.plot import in_words
from benchmarks.report import conditions
from benchmarks.results import CaseResult, Measure, Result
from benchmarks.stats import Estimate, Spread
from benchmarks.tables import PAGES, PLOT, RESULTS, rewritten
from click.testing import CliRunner

PAGE = """# A page
<!-- benchmarks:NAME -->
what stood here
<!-- /benchmarks -->
The block `<!-- benchmarks:ddp -->` inside a line is text.
"""


def case(name: str, value: float) -> CaseResult:
    times = {"gradwire": Spread(1.0, 0.5, 1.5), "torch": Spread(2.0, 1.75, 2.25)}
    estimate = Estimate(value, value - 0.1, value + 0.1)
    bare = {"no communication": Spread(0.25, 0.25, 0.25)}
    return CaseResult(
        name,
        f"expected of {name}",
        10,
        [
            Measure("step", "ms", {**times, **bare}, {"torch": estimate}),
            Measure("memory", "MB", times, {"torch": Estimate(1.0, 1.0, 1.0)}),
        ],
    )


def result(*values: float) -> Result:
    cases = [case(f"case {number}", value) for number, value in enumerate(values)]
    return Result.of("ddp", Options(rounds=10, only=["case 0"]), cases)


@pytest.fixture
def results(tmp_path: Path) -> Path:
    result(0.5, 2.0).write(tmp_path / "ddp.json")
    return tmp_path


def test_a_result_is_read_as_it_was_written(tmp_path: Path) -> None:
    written = result(0.5, 2.0)
    written.write(tmp_path / "ddp.json")
    assert Result.read(tmp_path / "ddp.json") == written


def test_the_command_rewrites_pages_and_checks_them(
    results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = results / "page.md"
    path.write_text(PAGE.replace("NAME", "ddp", 1))
    monkeypatch.setattr("benchmarks.__main__.PAGES", [path])
    monkeypatch.setattr("benchmarks.__main__.RESULTS", results)
    assert CliRunner().invoke(main, ["tables", "--check"]).exit_code == 1
    assert "what stood here" in path.read_text()
    assert CliRunner().invoke(main, ["tables"]).exit_code == 0
    assert "what stood here" not in path.read_text()
    assert CliRunner().invoke(main, ["tables", "--check"]).exit_code == 0


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_the_pages_of_the_repository_show_the_results_that_are_kept(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert tables.BLOCK.search(text)
    assert rewritten(text, RESULTS, BENCHMARKS) == text


def test_the_chart_of_the_repository_shows_the_results_that_are_kept() -> None:
    result, svg = Result.read(RESULTS / "ddp_shm.json"), PLOT.read_text(encoding="utf-8")
    assert f">{conditions(result)}<" in svg
    assert f">{in_words(result)}<" in svg


def test_the_command_draws(tmp_path: Path) -> None:
    svg = tmp_path / "chart.svg"
    assert CliRunner().invoke(main, ["plot", "--svg", str(svg)]).exit_code == 0
    assert svg.read_text(encoding="utf-8").startswith("<?xml")
