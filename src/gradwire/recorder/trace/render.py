"""Views of a trace: an HTML page without dependencies, and a PNG by matplotlib."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from gradwire.recorder.trace.chrome import LANES


def page_of(trace: Mapping[str, Any], title: str) -> str:
    """Return a trace as an HTML page with zoom and details on hover.

    Args:
        trace: Trace from `trace_of`.
        title: Title of the page.
    """
    events = [
        [e["pid"], e["tid"], round(e["ts"], 1), round(e["dur"], 1), e["name"], e["args"]]
        for e in trace["traceEvents"]
        if e["ph"] == "X"
    ]
    data = {
        "ranks": trace["otherData"]["ranks"],
        "lanes": LANES,
        "error": max(trace["otherData"]["clock error, us"].values(), default=0.0),
        "left_out": trace["otherData"].get("records left out", 0),
        "events": events,
    }
    template = (files("gradwire.recorder.trace") / "page.html").read_text(encoding="utf-8")
    # only "</" and "<!--" could end the script: escape each "<"
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    before, _, after = template.partition("DATA")  # before the title, which may contain "DATA"
    return before.replace("TITLE", html.escape(title)) + text + after


def draw(trace: Mapping[str, Any], path: Path) -> None:
    """Draw the lanes of all ranks to a PNG file.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    ranks = trace["otherData"]["ranks"]
    figure = Figure(figsize=(12, 1 + 0.9 * len(ranks)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    bars: dict[tuple[float, str], list[tuple[float, float]]] = {}
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            row = ranks.index(event["pid"]) * (len(LANES) + 1) + event["tid"]
            kind = "".join(c for c in event["name"] if not c.isdigit())
            bars.setdefault((row, kind), []).append((event["ts"] / 1e3, event["dur"] / 1e3))
    kinds = list(dict.fromkeys(kind for _, kind in bars))
    for (row, kind), spans in bars.items():
        axes.broken_barh(spans, (row - 0.4, 0.8), color=f"C{kinds.index(kind) % 10}")
    rows = {
        i * (len(LANES) + 1) + j: f"rank {rank}: {lane}"
        for i, rank in enumerate(ranks)
        for j, lane in enumerate(LANES)
    }
    axes.set_yticks(list(rows), list(rows.values()), fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    figure.savefig(path, dpi=120)
