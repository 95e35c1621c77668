"""A trace as a picture: the same lanes, drawn by matplotlib."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gradwire.recorder.trace.chrome import LANES

__all__ = ["draw"]


def draw(trace: Mapping[str, Any], path: Path) -> None:
    """Draw the lanes of all ranks into a PNG.

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
