"""Part of this package that needs PyTorch; it starts what environment variables ask for."""

from gradwire.recorder.black_box import handle_signal
from gradwire.recorder.control import dump as dump
from gradwire.recorder.control import start as start
from gradwire.recorder.control import start_from_environment
from gradwire.recorder.control import stop as stop
from gradwire.recorder.events import record_error as record_error
from gradwire.recorder.groups import RecordedGroup as RecordedGroup
from gradwire.recorder.groups import number_of_last as number_of_last
from gradwire.recorder.recording import BucketRecord as BucketRecord
from gradwire.recorder.recording import Entry as Entry
from gradwire.recorder.recording import StepRecord as StepRecord
from gradwire.recorder.recording import record_completion as record_completion
from gradwire.recorder.recording import record_end as record_end
from gradwire.recorder.recording import record_start as record_start
from gradwire.recorder.recording import ring as ring
from gradwire.recorder.trace.recording import start_from_environment as start_timeline
from gradwire.recorder.trace.recording import timeline as timeline

handle_signal()
start_from_environment()
start_timeline()
