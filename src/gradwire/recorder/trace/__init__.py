"""Views of a timeline: each rank's steps, buckets, collectives and waits, a trace for Perfetto.

`recording` and `chrome` write it, and need PyTorch.
"""

from gradwire.recorder.trace.render import page_of
from gradwire.recorder.trace.summary import HEADINGS, Summary, read_trace, row_of, summarize

__all__ = ["HEADINGS", "Summary", "page_of", "read_trace", "row_of", "summarize"]
