"""A run's first measure as a bar chart in SVG, the same bytes for the same results."""

from __future__ import annotations

import io

import matplotlib as mpl
from matplotlib.figure import Figure

from benchmarks.report import conditions
from benchmarks.results import Result

__all__ = ["bars", "in_words"]

COLORS = {"gradwire": "#00897b", "torch": "#90a4ae", "torch on Gloo": "#546e7a"}
HEIGHT = 0.8


def bars(result: Result) -> str:
    """A group of bars for each case: medians, with quartiles as error bars.

    Without the contender that does not communicate: a line in each group shows its median.
    """
    names = {"gradwire": f"gradwire on {result.options.backend}"}
    names["torch"] = f"torch on {result.options.backend}"
    contenders = [name for name in COLORS if name in result.cases[0].measures[0].contenders]
    # the SVG has text as text, and neither a date nor random names of elements
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "gradwire", "font.size": 9}):
        figure = Figure(figsize=(7, 0.55 + 0.8 * len(result.cases)), layout="constrained")
        axes = figure.add_subplot()
        for place, name in enumerate(contenders):
            spreads = [case.measures[0].contenders[name] for case in result.cases]
            medians = [spread.median for spread in spreads]
            errors = (
                [s.median - s.lower for s in spreads],
                [s.upper - s.median for s in spreads],
            )
            height = HEIGHT / len(contenders)
            at = [i + (place - (len(contenders) - 1) / 2) * height for i in range(len(spreads))]
            label = names.get(name, name)
            axes.barh(at, medians, height * 0.9, xerr=errors, color=COLORS[name], label=label)
        for i, case in enumerate(result.cases):
            if alone := case.measures[0].contenders.get("no communication"):
                label = "" if i else "without communication"
                axes.plot([alone.median] * 2, [i - 0.45, i + 0.45], "k:", label=label)
        axes.set_yticks(range(len(result.cases)), [case.name for case in result.cases])
        axes.invert_yaxis()
        axes.set_xlabel(f"{result.cases[0].measures[0].name}, {result.cases[0].measures[0].unit}")
        axes.spines[["top", "right"]].set_visible(False)
        figure.legend(loc="outside upper center", ncols=4, frameon=False)
        buffer = io.StringIO()
        metadata = {"Title": conditions(result), "Description": in_words(result)}
        nothing = {"Date": None, "Creator": None}
        figure.savefig(buffer, format="svg", metadata={**metadata, **nothing})
    return "".join(f"{line.rstrip()}\n" for line in buffer.getvalue().splitlines())


def in_words(result: Result) -> str:
    """The medians that the chart shows, for who cannot see it."""
    return "; ".join(
        f"{case.name}: "
        + ", ".join(
            f"{name} {spread.median:.1f} {case.measures[0].unit}"
            for name, spread in case.measures[0].contenders.items()
        )
        for case in result.cases
    )
