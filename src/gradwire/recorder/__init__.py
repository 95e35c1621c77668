"""Flight recorder: the last collectives of this rank, and the ranks that it waited for.

Recording is always on. `start` or GRADWIRE_RECORDER sets the directory of dumps. Dumps are in the
format of torch's flight recorder, and `gradwire explain` reads them.
"""

from gradwire.recorder.black_box import handle_signal
from gradwire.recorder.control import dump, start, start_from_environment, stop
from gradwire.recorder.events import failed
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
from gradwire.recorder.trace import start_from_environment as start_timeline
from gradwire.recorder.trace import timeline

__all__ = [
    "BucketRecord",
    "Entry",
    "RecordedGroup",
    "StepRecord",
    "dump",
    "failed",
    "number_of_last",
    "record_completion",
    "record_end",
    "record_start",
    "ring",
    "start",
    "stop",
    "timeline",
]

handle_signal()
start_from_environment()
start_timeline()
