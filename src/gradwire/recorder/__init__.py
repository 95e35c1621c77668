"""Flight recorder: the last collectives of this rank, and the ranks that it waited for.

Recording is always on. `start` or GRADWIRE_RECORDER sets the directory of dumps. Dumps are in the
format of torch's flight recorder, and `gradwire explain` reads them: without PyTorch, since to
import it takes longer than the rest.
"""

import importlib
import sys
from typing import TYPE_CHECKING, Any

# Names imported as themselves are for other packages of gradwire, and not public.
from gradwire.recorder.files import PREFIX as PREFIX
from gradwire.recorder.files import REQUEST as REQUEST
from gradwire.recorder.lines import is_users as is_users
from gradwire.recorder.processes import await_answers as await_answers
from gradwire.recorder.processes import describe as describe
from gradwire.recorder.processes import modified as modified

if TYPE_CHECKING or "torch" in sys.modules:
    from gradwire.recorder.black_box import dump, start, start_from_environment, stop
    from gradwire.recorder.events import record_error as record_error
    from gradwire.recorder.groups import RecordedGroup as RecordedGroup
    from gradwire.recorder.groups import number_of_last as number_of_last
    from gradwire.recorder.recording import BucketRecord as BucketRecord
    from gradwire.recorder.recording import Entry as Entry
    from gradwire.recorder.recording import record_end as record_end
    from gradwire.recorder.recording import record_start as record_start
    from gradwire.recorder.recording import ring
    from gradwire.recorder.tracing import start_from_environment as start_timeline
    from gradwire.recorder.tracing import timeline

    start_from_environment()
    start_timeline()

__all__ = ["dump", "ring", "start", "stop", "timeline"]
_FOR_PACKAGES = {"BucketRecord", "Entry", "RecordedGroup", "number_of_last"}
_FOR_PACKAGES |= {"record_end", "record_error", "record_start"}


def __getattr__(name: str) -> Any:
    if name not in _FOR_PACKAGES and name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import torch  # noqa: F401  # first: with GRADWIRE_COMPAT=1 it imports parts of gradwire

    return getattr(importlib.reload(sys.modules[__name__]), name)
