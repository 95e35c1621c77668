"""A trace as one HTML page that needs nothing else: lanes for each rank, zoom, details on hover."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from gradwire.recorder.trace.chrome import LANES

__all__ = ["page_of"]


def page_of(trace: Mapping[str, Any], title: str) -> str:
    """The page.

    Args:
        trace: As `trace_of` makes it.
        title: What it is called.
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
    # in a script, only "</" and "<!--" could end it: no "<" is left in the data
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    before, _, after = template.partition("DATA")  # a title may have this word, too
    return before.replace("TITLE", html.escape(title)) + text + after
