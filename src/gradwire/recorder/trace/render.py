"""View of a trace: an HTML page without dependencies."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
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
