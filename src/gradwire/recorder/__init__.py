"""Flight recorder: the last collectives of this rank, and the ranks that it waited for.

Recording is always on. `start` or GRADWIRE_RECORDER sets the directory of dumps. Dumps are in the
format of torch's flight recorder, and `gradwire explain` reads them.
"""

from gradwire.recorder.black_box import FIRST as FIRST
from gradwire.recorder.black_box import PREFIX as PREFIX
from gradwire.recorder.black_box import handle_signal
from gradwire.recorder.control import dump, start, start_from_environment, stop
from gradwire.recorder.events import record_error
from gradwire.recorder.groups import RecordedGroup, number_of_last
from gradwire.recorder.kernel import describe as describe
from gradwire.recorder.lines import is_users as is_users
from gradwire.recorder.recording import (
    BucketRecord,
    Entry,
    StepRecord,
    record_completion,
    record_end,
    record_start,
    ring,
)
from gradwire.recorder.requests import REQUEST as REQUEST
from gradwire.recorder.requests import await_answers as await_answers
from gradwire.recorder.requests import modified as modified
from gradwire.recorder.requests import processes_in as processes_in
from gradwire.recorder.trace import start_from_environment as start_timeline
from gradwire.recorder.trace import timeline

# Names imported as themselves are for other packages of gradwire, and not public.
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
