"""Results as rows of text, and these as a table for the terminal or for Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rich.table import Table

from benchmarks.results import CaseResult, Measure, Result
from benchmarks.stats import Estimate, Spread, geometric_mean

__all__ = [
    "Rows",
    "conditions",
    "figures",
    "grid",
    "headline",
    "markdown",
    "predictions",
    "terminal",
]


@dataclass(frozen=True)
class Rows:
    """A table before it is drawn."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]


def figures(result: Result) -> Rows:
    """Medians with their quartiles, ratios with their intervals; then the means over the cases."""
    measures = [measure for case in result.cases for measure in case.measures]
    contenders = list(dict.fromkeys(name for m in measures for name in m.contenders))
    peers = list(dict.fromkeys(peer for m in measures for peer in m.ratios))
    header = ["case", "measure", *contenders, *(f"ratio to {peer}" for peer in peers)]
    rows = [
        [case.name, _named(measure), *_row(measure, contenders, peers)]
        for case in result.cases
        for measure in case.measures
    ]
    for name in dict.fromkeys(measure.name for measure in measures if measure.ratios):
        by_peer = {s.peer: s.geometric_mean for s in result.summary if s.measure == name}
        ratios = [f"{mean:.3f}" if (mean := by_peer.get(peer)) else "" for peer in peers]
        rows.append(["geometric mean", name, *("" for _ in contenders), *ratios])
    return Rows(header, rows)


def headline(result: Result) -> Rows:
    """Each case's first measure alone: the one that a reader asks for first."""
    firsts = [replace(case, measures=case.measures[:1]) for case in result.cases]
    rows = figures(replace(result, cases=firsts))
    return Rows(rows.header, rows.rows[: len(firsts)])


def grid(result: Result) -> Rows:
    """For cases "operation, condition": mean and largest of the ratios to the first peer."""
    cells: dict[str, dict[str, str]] = {}
    for case in result.cases:
        row, _, column = case.name.partition(", ")
        ratios = {m.name: next(iter(m.ratios.values())) for m in case.measures}
        where = max(ratios, key=lambda name: ratios[name].value)
        worst = ratios[where]
        mean = geometric_mean([ratio.value for ratio in ratios.values()])
        cells.setdefault(row, {})[column] = f"{mean:.2f}, at most {worst.value:.2f} at {where}"
    columns = list(dict.fromkeys(column for row in cells.values() for column in row))
    rows = [[row, *(of.get(column, "") for column in columns)] for row, of in cells.items()]
    return Rows(["ratio to Gloo", *columns], rows)


def predictions(result: Result) -> Rows:
    """Return the expectation for each case beside its measured ratios."""
    rows = [[case.name, case.prediction, _ratios(case)] for case in result.cases]
    return Rows(["case", "prediction", "measured ratio"], rows)


def conditions(result: Result) -> str:
    """Return a sentence with date, host and options of the measurement."""
    host, options = result.host, result.options
    ranks = f"{options.world_size or 'several'} ranks on {options.backend}"
    if options.hosts:
        ranks = f"{' + '.join(map(str, options.hosts))} ranks on {len(options.hosts)} hosts"
    if options.busy:
        ranks += f" beside {options.busy} busy process{'es' if options.busy > 1 else ''}"
    return (
        f"{'one process' if options.world_size == 1 else ranks}, {options.rounds} rounds, "
        f"{result.date[:10]}; {host.cpu}, {host.cores} cores, {host.memory_gib} GiB, "
        f"{host.system}; Python {host.python}, torch {host.torch}, gradwire {host.gradwire}."
    )


def terminal(rows: Rows, title: str, caption: str) -> Table:
    """For rich to print."""
    table = Table(title=title, caption=caption, caption_justify="left")
    for number, name in enumerate(rows.header):
        table.add_column(name, justify="left" if number < 2 else "right")
    for row in rows.rows:
        table.add_row(*row)
    return table


def markdown(rows: Rows) -> str:
    """A table in the pipe syntax; no cell may hold a pipe."""
    rule = ["---" for _ in rows.header]
    return "\n".join(f"| {' | '.join(row)} |" for row in [rows.header, rule, *rows.rows])


def _named(measure: Measure) -> str:
    return f"{measure.name}, {measure.unit}"


def _row(measure: Measure, contenders: Sequence[str], peers: Sequence[str]) -> list[str]:
    return [
        *(_spread(measure.contenders.get(name)) for name in contenders),
        *(_estimate(measure.ratios.get(peer)) for peer in peers),
    ]


def _ratios(case: CaseResult) -> str:
    return "; ".join(
        f"{measure.name} {estimate.value:.2f} of {peer}'s"
        for measure in case.measures
        for peer, estimate in measure.ratios.items()
    )


def _spread(spread: Spread | None) -> str:
    if spread is None:
        return ""
    return f"{spread.median:.1f} ({spread.lower:.1f}–{spread.upper:.1f})"  # noqa: RUF001


def _estimate(estimate: Estimate | None) -> str:
    if estimate is None:
        return ""
    return f"{estimate.value:.3f} ({estimate.low:.3f}–{estimate.high:.3f})"  # noqa: RUF001
