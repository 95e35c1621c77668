"""Views of a trace: an HTML page without dependencies, and a PNG by matplotlib."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from gradwire.recorder.trace.summary import (
    BUCKETS,
    HEADINGS,
    LANES,
    STEPS,
    WAITS,
    Summary,
    row_of,
    summarize,
)

COLOURS = {
    "between steps": "#e3d3a3",
    "garbage collection": "#e377c2",
    "forward": "#7cb5ec",
    "backward": "#4a7ebb",
    "exposed communication": "#e4572e",
    "pack": "#c5b0d5",
    "send": "#9467bd",
    "in flight": "#98c379",
    "waiting": "#f4a259",
    "all_reduce": "#2a9d8f",
    "all_gather": "#17607a",
    "reduce_scatter": "#b5a642",
    "broadcast": "#7f5539",
    "all_to_all": "#8f8fc9",
    "barrier": "#6b6b6b",
    "other": "#c0c0c0",
}
"""Colour of each kind of event."""
_PIXELS = 1100  # of a picture's time axis
_MOST_ROWS = 64  # of a picture; a page has all


def kind_of(event: Mapping[str, Any]) -> str:
    """Return the kind of an event, a key of `COLOURS`."""
    name = str(event["name"])
    if event["tid"] == WAITS:
        return "waiting"
    if event["tid"] == BUCKETS:
        return name.rpartition(": ")[2]
    return name if name in COLOURS else next((k for k in COLOURS if name.startswith(k)), "other")


def page_of(trace: Mapping[str, Any], title: str) -> str:
    """Return a trace as an HTML page with verdict, table, legend, zoom, and details on hover.

    Args:
        trace: Trace from `trace_of`.
        title: Title of the page.
    """
    slices = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    events = [
        [
            e["pid"],
            e["tid"],
            round(e["ts"], 1),
            round(e["dur"], 1),
            e["name"],
            e["args"],
            kind_of(e),
        ]
        for e in slices
    ]
    summary = summarize(trace)
    data = {
        "ranks": trace["otherData"]["ranks"],
        "lanes": LANES,
        "error": max(trace["otherData"]["clock error, us"].values(), default=0.0),
        "left_out": trace["otherData"].get("records left out", 0),
        "colours": COLOURS,
        "verdict": summary.verdict,
        "table": _table(summary),
        "worst": _longest_step(slices),
        "events": events,
    }
    template = (files("gradwire.recorder.trace") / "page.html").read_text(encoding="utf-8")
    # only "</" and "<!--" could end the script: escape each "<"
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    before, _, after = template.partition("DATA")  # before the title, which may contain "DATA"
    return before.replace("TITLE", html.escape(title)) + text + after


def _table(summary: Summary) -> list[list[str]]:
    return [list(HEADINGS), *(row_of(rank) for rank in summary.ranks)]


def _longest_step(slices: Sequence[Mapping[str, Any]]) -> list[float] | None:
    """Return begin and end of the step that took longest on any rank, after the first; or None."""
    spans: dict[tuple[int, int], tuple[float, float]] = {}
    for event in slices:
        if event["tid"] == STEPS and "step" in event["args"]:
            key = event["pid"], event["args"]["step"]
            begin, end = spans.get(key, (event["ts"], event["ts"]))
            spans[key] = min(begin, event["ts"]), max(end, event["ts"] + event["dur"])
    first = min((step for _, step in spans), default=0)
    later = {key: span for key, span in spans.items() if key[1] > first} or spans
    if not later:
        return None
    begin, end = max(later.values(), key=_length)
    return [begin, end]


def _length(span: tuple[float, float]) -> float:
    return span[1] - span[0]


def draw(trace: Mapping[str, Any], path: Path) -> None:
    """Draw the lanes of all ranks to a PNG file, with the summary as its title and a legend.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    ranks = trace["otherData"]["ranks"]
    shown = ranks[: _MOST_ROWS // len(LANES)] if len(ranks) * len(LANES) > 4 * _MOST_ROWS else ranks
    figure = Figure(figsize=(12, 1.6 + 0.9 * len(shown)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    bars = _bars([e for e in trace["traceEvents"] if e["ph"] == "X"], shown)
    for (row, kind), spans in bars.items():
        axes.broken_barh(spans, (row - 0.4, 0.8), color=COLOURS[kind], linewidth=0)
    rows = {
        i * (len(LANES) + 1) + j: f"rank {rank}: {lane}"
        for i, rank in enumerate(shown)
        for j, lane in enumerate(LANES)
    }
    axes.set_yticks(list(rows), list(rows.values()), fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("time, ms")
    left_out = f" (ranks 0 to {len(shown) - 1} of {len(ranks)})" if len(shown) < len(ranks) else ""
    axes.set_title(summarize(trace).verdict + left_out, fontsize=10, loc="left", wrap=True)
    kinds = [kind for kind in COLOURS if any(kind == found for _, found in bars)]
    patches = [Patch(color=COLOURS[kind], label=kind) for kind in kinds]
    figure.legend(handles=patches, loc="outside lower center", ncols=7, fontsize=8)
    figure.savefig(path, dpi=120)


def _bars(
    slices: Sequence[Mapping[str, Any]], ranks: Sequence[int]
) -> dict[tuple[int, str], list[tuple[float, float]]]:
    """Return begins and lengths in ms, by row and kind.

    Events that are shorter than a pixel would hide each other: each pixel has the kind that took
    most of its time.
    """
    end = max((event["ts"] + event["dur"] for event in slices), default=1.0)
    pixel = end / _PIXELS
    bars: dict[tuple[int, str], list[tuple[float, float]]] = {}
    short: dict[tuple[int, int], dict[str, float]] = {}
    rows = {rank: number * (len(LANES) + 1) for number, rank in enumerate(ranks)}
    for event in slices:
        if event["pid"] in rows:
            row, kind = rows[event["pid"]] + event["tid"], kind_of(event)
            if event["dur"] >= pixel:
                bars.setdefault((row, kind), []).append((event["ts"] / 1e3, event["dur"] / 1e3))
            else:
                times = short.setdefault((row, int(event["ts"] / pixel)), {})
                times[kind] = times.get(kind, 0.0) + event["dur"]
    for (row, cell), times in short.items():
        kind = max(times, key=times.__getitem__)
        bars.setdefault((row, kind), []).append((cell * pixel / 1e3, pixel / 1e3))
    return bars
