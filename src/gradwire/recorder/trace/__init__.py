"""Timeline of each rank's steps, buckets, collectives and waits, as a trace for Perfetto."""

from gradwire.recorder.trace.recording import VARIABLE, start_from_environment, timeline
from gradwire.recorder.trace.render import draw as draw
from gradwire.recorder.trace.render import page_of as page_of
from gradwire.recorder.trace.summary import HEADINGS as HEADINGS
from gradwire.recorder.trace.summary import Summary as Summary
from gradwire.recorder.trace.summary import read_trace as read_trace
from gradwire.recorder.trace.summary import row_of as row_of
from gradwire.recorder.trace.summary import summarize as summarize

__all__ = ["VARIABLE", "start_from_environment", "timeline"]
