"""Timeline of each rank's steps, buckets, collectives and waits, as a trace for Perfetto."""

from gradwire.recorder.trace.recording import VARIABLE, start_from_environment, timeline

__all__ = ["VARIABLE", "start_from_environment", "timeline"]
