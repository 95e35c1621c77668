"""Part of this package that needs PyTorch; it starts what environment variables ask for."""

from gradwire.recorder.black_box import handle_signal
from gradwire.recorder.control import dump, start, start_from_environment, stop
from gradwire.recorder.events import record_error
from gradwire.recorder.groups import RecordedGroup, number_of_last
from gradwire.recorder.recording import (
    BucketRecord,
    Entry,
    StepRecord,
    record_completion,
    record_end,
    record_start,
    ring,
)
from gradwire.recorder.trace.recording import start_from_environment as start_timeline
from gradwire.recorder.trace.recording import timeline

__all__ = [
    "BucketRecord",
    "Entry",
    "RecordedGroup",
    "StepRecord",
    "dump",
    "number_of_last",
    "record_completion",
    "record_end",
    "record_error",
    "record_start",
    "ring",
    "start",
    "stop",
    "timeline",
]

handle_signal()
start_from_environment()
start_timeline()
