"""Tables in the pages, written from the results that are kept in `benchmarks/results/`.

`<!-- benchmarks:NAME -->` and `<!-- /benchmarks -->`, each on its own line, enclose the table of
`results/NAME.json`. `NAME ratios` has only the ratios of each case's first measure, `NAME
predictions` the expectations, `NAME grid` a row for each operation, and `NAME contenders` one for
each contender. `summary` is the table of all benchmarks. Results of
`--backend shm`, `--world-size 4`, `--busy 1`, `--all` or `--only` are kept under `NAME_shm`,
`NAME_4`, `NAME_busy`, `NAME_all` or `NAME_only`. Those of a second host have the suffix `_other`.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

from benchmarks.report import Rows, conditions, figures, grid, headline, markdown, predictions
from benchmarks.results import Result
from benchmarks.transposed import tables as by_contender

__all__ = ["PAGES", "PLOT", "RESULTS", "rewritten"]

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PLOT = ROOT / "docs" / "step_time.svg"
PAGES = [
    ROOT / "README.md",
    ROOT / "docs" / "benchmarks.md",
    *(
        page
        for page in sorted((ROOT / "docs" / "benchmarks").glob("*.md"))
        if page.stem not in ("check", "decisions", "elastic")  # their tables are written by hand
    ),
]

SUMMARY = [
    ("ddp", "training step on Gloo"),
    ("ddp_shm", "training step on shm"),
    ("broadcast", "coalesced broadcast on Gloo"),
    ("broadcast_shm", "coalesced broadcast on shm"),
    ("collectives", "collectives on shm, two ranks"),
    ("collectives_4", "collectives on shm, four ranks on two cores"),
    ("differentiable", "differentiable collectives, forward"),
    ("overhead", "Python time of a differentiable collective"),
    ("hooks", "training step with a compressing hook, fast link"),
    ("devices", "sums and copies between CPU replicas"),
    ("recorder", "training step with the recorder"),
    ("links", "all_reduce between hosts"),
    ("mpi", "all_reduce on shm"),
]
"""Results in the summary, and their descriptions."""

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
        if name == "summary":
            table = markdown(_summary(results))
            return f"<!-- benchmarks:summary -->\n\n{table}\n\n<!-- /benchmarks -->"
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


def _summary(results: Path) -> Rows:
    """Return a row for each benchmark: its page, and the first measure's ratio to each peer."""
    rows = []
    for name, description in SUMMARY:
        summary = Result.read(results / f"{name}.json").summary
        ratios = "; ".join(
            f"{s.geometric_mean:.2f} of {s.peer} (up to {s.largest:.2f})"
            for s in summary
            if s.measure == summary[0].measure and s.geometric_mean is not None
        )
        page = VARIANT.sub("", name)
        rows.append([f"[{page}](benchmarks/{page}.md)", description, ratios])
    return Rows(["benchmark", "case", "ratio: mean (largest)"], rows)


def _figures(result: Result) -> str:
    return f"{markdown(figures(result))}\n\n{conditions(result)}"


def _ratios(result: Result) -> str:
    rows = headline(result)
    first = next(i for i, name in enumerate(rows.header) if name.startswith("ratio"))
    columns = [0, *range(first, len(rows.header))]
    kept = [[row[i] for i in columns] for row in [rows.header, *rows.rows]]
    return f"{markdown(Rows(kept[0], kept[1:]))}\n\n{conditions(result)}"


def _grid(result: Result) -> str:
    return f"{markdown(grid(result))}\n\n{conditions(result)}"


def _predictions(result: Result) -> str:
    return markdown(predictions(result))


VIEWS = {
    "": _figures,
    " contenders": by_contender,
    " grid": _grid,
    " predictions": _predictions,
    " ratios": _ratios,
}
