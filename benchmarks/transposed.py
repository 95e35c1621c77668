"""Results of many contenders: a table for each measure, a line for each contender."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.report import Rows, conditions, markdown
from benchmarks.results import CaseResult, Measure, Result
from benchmarks.stats import Spread

__all__ = ["by_contender", "tables"]


def tables(result: Result) -> str:
    """Markdown: what differs from case to case, a table each; then what does not, in one."""
    names = list(dict.fromkeys(m.name for case in result.cases for m in case.measures))
    texts, same = [], list[Measure]()
    for name in names:
        found = _cases(result.cases, name)
        first = next(iter(found.values()))
        if len(found) > 1 and all(m.contenders == first.contenders for m in found.values()):
            same.append(first)
        else:
            columns = {case: measure.contenders for case, measure in found.items()}
            texts.append(f"{_titled(first)}:\n\n{markdown(by_contender(columns))}")
    if same:
        columns = {_titled(measure): measure.contenders for measure in same}
        texts.append(f"in every case:\n\n{markdown(by_contender(columns))}")
    return "\n\n".join([*texts, conditions(result)])


def by_contender(columns: Mapping[str, Mapping[str, Spread]]) -> Rows:
    """A line for each contender; where it has no figure, a dash.

    Args:
        columns: Figures of each column, by contender.
    """
    contenders = dict.fromkeys(name for figures in columns.values() for name in figures)
    rows = [[name, *(_cell(of.get(name)) for of in columns.values())] for name in contenders]
    return Rows(["", *columns], rows)


def _cases(cases: Sequence[CaseResult], name: str) -> dict[str, Measure]:
    """The measure of that name, by the names of the cases that have it."""
    return {case.name: m for case in cases for m in case.measures if m.name == name}


def _titled(measure: Measure) -> str:
    return f"{measure.name}, {measure.unit}" if measure.unit else measure.name


def _cell(spread: Spread | None) -> str:
    if spread is None:
        return "–"  # noqa: RUF001
    digits = 2 if spread.upper < 100 else 0
    middle, low, high = (f"{x:.{digits}f}" for x in (spread.median, spread.lower, spread.upper))
    return middle if low == high else f"{middle} ({low}–{high})"  # noqa: RUF001
