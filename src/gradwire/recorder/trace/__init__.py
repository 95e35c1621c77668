"""The timeline: where each rank's time goes, as a trace for Perfetto."""

from gradwire.recorder.trace.recording import VARIABLE, start_from_environment, timeline

__all__ = ["VARIABLE", "start_from_environment", "timeline"]
