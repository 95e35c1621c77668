"""Tables in the pages, written from the results that are kept in `benchmarks/results/`.

A page says where: between `<!-- benchmarks:NAME -->` and `<!-- /benchmarks -->`, each on a line of
its own, stands the table of `results/NAME.json`; for `NAME headline` only its first measure, for
`NAME predictions` what was expected, for `NAME grid` a line for each operation, for `NAME
contenders` one for each contender. What stood there before is replaced. What was run with
`--backend shm`, `--world-size 4`, `--busy 1`, `--all` or, of some cases, `--only` is kept under
`NAME_shm`, `NAME_4`, `NAME_busy`, `NAME_all` or `NAME_only`; what was measured on another host as
well, under the same with `_other`.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

from benchmarks.report import conditions, figures, grid, headline, markdown, predictions
from benchmarks.results import Result
from benchmarks.transposed import tables as by_contender

__all__ = ["PAGES", "PLOT", "RESULTS", "rewritten"]

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PLOT = ROOT / "docs" / "step_time.svg"
PAGES = [ROOT / "README.md", ROOT / "docs" / "benchmarks.md"]

BLOCK = re.compile(
    r"^<!-- benchmarks:(?P<name>\w+)(?P<view> \w+)? -->\n.*?^<!-- /benchmarks -->$",
    re.MULTILINE | re.DOTALL,
)
VARIANT = re.compile(r"(_(shm|busy|all|only|other|\d+))+$")


def rewritten(page: str, results: Path, benchmarks: Collection[str]) -> str:
    """The page with the tables of these results.

    Where a benchmark has no results, the page is left as it is.

    Raises:
        ValueError: A block asks for a benchmark, or a view of it, that does not exist.
    """

    def block(match: re.Match[str]) -> str:
        name, view = match["name"], match["view"] or ""
        if VARIANT.sub("", name) not in benchmarks or view not in VIEWS:
            raise ValueError(
                f"the page has a block benchmarks:{name}{view}: the benchmarks are "
                f"{', '.join(benchmarks)}, each alone or followed by one of{','.join(VIEWS)}"
            )
        path = results / f"{name}.json"
        if not path.exists():
            return match[0]
        table = VIEWS[view](Result.read(path))
        return f"<!-- benchmarks:{name}{view} -->\n\n{table}\n\n<!-- /benchmarks -->"

    return BLOCK.sub(block, page)


def _figures(result: Result) -> str:
    return f"{markdown(figures(result))}\n\n{conditions(result)}"


def _headline(result: Result) -> str:
    return f"{markdown(headline(result))}\n\n{conditions(result)}"


def _grid(result: Result) -> str:
    return f"{markdown(grid(result))}\n\n{conditions(result)}"


def _predictions(result: Result) -> str:
    return markdown(predictions(result))


VIEWS = {
    "": _figures,
    " contenders": by_contender,
    " grid": _grid,
    " headline": _headline,
    " predictions": _predictions,
}
