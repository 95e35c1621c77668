"""The black box: what ran on this rank, and who waited for whom.

The ring is always on. Dumps are written where `start` or GRADWIRE_RECORDER says, in the format of
torch's flight recorder; `gradwire explain` reads them.
"""

from gradwire.recorder.control import dump, start, start_from_environment, stop
from gradwire.recorder.events import failed
from gradwire.recorder.groups import RecordedGroup, number_of_last
from gradwire.recorder.recording import (
    DONE,
    ENDED,
    STARTED,
    WAITS,
    BucketRecord,
    Entry,
    StepRecord,
    ring,
)
from gradwire.recorder.trace import start_from_environment as start_timeline
from gradwire.recorder.trace import timeline

__all__ = [
    "DONE",
    "ENDED",
    "STARTED",
    "WAITS",
    "BucketRecord",
    "Entry",
    "RecordedGroup",
    "StepRecord",
    "dump",
    "failed",
    "number_of_last",
    "ring",
    "start",
    "stop",
    "timeline",
]

start_from_environment()
start_timeline()
