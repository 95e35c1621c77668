"""Flight recorder: the last collectives of this rank, and the ranks that it waited for.

Recording is always on. `start` or GRADWIRE_RECORDER sets the directory of dumps. Dumps are in the
format of torch's flight recorder, and `gradwire explain` reads them: without PyTorch, since to
import it takes longer than the rest. So the names in `api` are imported on first use in a process
that has not imported torch.
"""

import sys
from typing import TYPE_CHECKING, Any

from gradwire.recorder.files import FIRST as FIRST
from gradwire.recorder.files import PREFIX as PREFIX
from gradwire.recorder.kernel import describe as describe
from gradwire.recorder.lines import is_users as is_users
from gradwire.recorder.requests import REQUEST as REQUEST
from gradwire.recorder.requests import await_answers as await_answers
from gradwire.recorder.requests import modified as modified
from gradwire.recorder.requests import processes_in as processes_in

if TYPE_CHECKING or "torch" in sys.modules:
    from gradwire.recorder.api import (
        BucketRecord,
        Entry,
        RecordedGroup,
        StepRecord,
        dump,
        number_of_last,
        record_completion,
        record_end,
        record_error,
        record_start,
        ring,
        start,
        stop,
        timeline,
    )

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


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import torch  # noqa: F401  # first: with GRADWIRE_COMPAT=1 it imports parts of gradwire

    from gradwire.recorder import api

    globals().update({each: getattr(api, each) for each in __all__})
    return globals()[name]
