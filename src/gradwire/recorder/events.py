"""Errors of this process in order, from which a verdict starts, and their origin.

The origin is a call that waits for other ranks, a data loader, or the user's code. Gloo raises
plain RuntimeErrors, like errors of wrong shapes: the raising code (C or Python) and the function
being called tell them apart.
"""

from __future__ import annotations

import dis
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import CodeType

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from gradwire.errors import GradwireError, MismatchError, PeerFailedError
from gradwire.recorder.files import ErrorRecord
from gradwire.recorder.groups import GroupInfo, info_of
from gradwire.recorder.lines import (
    Location,
    MainThread,
    call_stack,
    is_users,
    read_stack,
    users_line,
)
from gradwire.recorder.recording import ERROR, GROUP, Entry

_KEPT = 32
_NOTED = "_gradwire_noted"  # attribute of the error: IDs are reused after deletion
_MOST = 16  # maximum length of a chain
_COMMUNICATION = (
    str(Path(torch.__file__).parent / "distributed") + os.sep,
    str(Path(__file__).parents[1]) + os.sep,
)
_LOADING = str(Path(torch.__file__).parent / "utils" / "data") + os.sep
_WAITS = {"result", "synchronize", "value", "wait", "wait_all"}
"""Methods of handles and futures that the user's own lines call."""
_OF_WAITS = (RuntimeError, KeyboardInterrupt)
"""Errors that a wait raises; others that C code raises are of its arguments."""
_PLUMBING = {"wrapper", "inner", "_fn", "<module>"}  # of decorators, and imports
_RAISE = {dis.opmap["RAISE_VARARGS"], dis.opmap["RERAISE"]}


events: deque[ErrorRecord] = deque(maxlen=_KEPT)
on_failure: list[Callable[[ErrorRecord], None]] = []
"""Functions called with each recorded error; see `black_box`."""


def record_error(
    error: BaseException,
    entry: Entry | None = None,
    *,
    kind: str = "error",
    group: ProcessGroup | None = None,
) -> None:
    """Record an error, of a collective or of ranks that disagree in `group`; never raise."""
    if entry is not None:
        entry[ERROR] = f"{type(error).__name__}: {error}"
    # an error that is passed several times is recorded once, and once more if it ends the process:
    # then `kind` is "uncaught"
    if vars(error).get(_NOTED) == kind:
        return
    vars(error)[_NOTED] = kind
    trace = trace_of(error)
    locations: list[Location] = trace[::-1]
    if kind != "uncaught":
        locations += call_stack(sys._getframe(1))
    chain = list(causes_of(error))
    root = read_stack(trace_of(chain[-1])[::-1])[:4] if chain else []
    since = MainThread.since if users_line(MainThread.stack) in locations else MainThread.seen
    parameters = getattr(error, "parameters", ()) if isinstance(error, GradwireError) else ()
    reported, info = list[int](), info_of(group)
    if isinstance(error, PeerFailedError) and info is not None:
        reported = [info.ranks[rank] for rank in error.ranks if rank < len(info.ranks)]
    event = ErrorRecord(
        kind,
        type(error).__name__,
        _text(error),
        list(parameters),
        time.perf_counter_ns(),
        read_stack(locations)[:8],
        [type(each).__name__ for each in chain],
        any(map(came_from_waiting, [error, *chain])),
        called_by_user(locations),
        _values_by_rank(error, entry[GROUP].find_name() if entry else info_of(group)),
        came_from_loading(error),
        all(map(raised_in_python, [error, *chain])),
        reported,
        since if threading.current_thread() is threading.main_thread() else 0,
        f"{type(chain[-1]).__name__}: {_text(chain[-1])}" if chain else "",
        root,
    )
    events.append(event)
    for listener in on_failure:
        listener(event)


def _text(error: BaseException) -> str:
    try:
        return str(error)[:4000]
    except Exception as other:
        return f"(str() of this error raised {type(other).__name__})"


def _values_by_rank(error: BaseException, info: GroupInfo | None) -> dict[int, str]:
    """Return each rank's value if the error says that ranks disagree."""
    values = getattr(error, "values", ())
    world = info_of(dist.group.WORLD) if info is None and dist.is_initialized() else None
    info = info or world
    if not isinstance(error, MismatchError) or info is None or len(values) != len(info.ranks):
        return {}
    return dict(zip(info.ranks, values, strict=True))


# -- origins -------------------------------------------------------------------------------------


def causes_of(error: BaseException) -> Iterator[BaseException]:
    """Yield the causes and contexts of an error, from the inside out."""
    for _ in range(_MOST):
        inner = error.__cause__ or error.__context__
        if inner is None:
            return
        yield inner
        error = inner


def trace_of(error: BaseException) -> list[Location]:
    """Return an error's frames, outermost first."""
    found, at = [], error.__traceback__
    while at is not None:
        found.append((at.tb_frame.f_code, at.tb_lasti))
        at = at.tb_next
    return found


def came_from_waiting(error: BaseException) -> bool:
    """Return True if C code raised the error in a call that may wait for other ranks."""
    trace = trace_of(error)
    if not trace or not isinstance(error, _OF_WAITS) or raised_in_python(error):
        return False
    code, instruction = trace[-1]
    if is_users(code.co_filename):
        return not _WAITS.isdisjoint(_names_on_line(code, instruction))
    # False for errors from backward, where the origin cannot be decided
    return code.co_filename.startswith(_COMMUNICATION)


def raised_in_python(error: BaseException) -> bool:
    """Return True if a `raise` statement raised the error, not code in C."""
    trace = trace_of(error)
    return bool(trace) and trace[-1][0].co_code[trace[-1][1]] in _RAISE


def came_from_loading(error: BaseException) -> bool:
    """Return True if a data loader raised the error."""
    # when a worker has died, a signal handler raises it wherever the main thread is, even in a
    # collective
    for code, _ in reversed(trace_of(error)):
        if is_users(code.co_filename) or code.co_filename.startswith(_LOADING):
            return code.co_filename.startswith(_LOADING)
    return False


def called_by_user(locations: Sequence[Location]) -> str:
    """Return the torch.distributed function that the user's innermost line called; "" if none."""
    called = ""
    # innermost frame first
    for code, _ in locations:
        if is_users(code.co_filename):
            return called
        if code.co_name not in _PLUMBING:
            called = code.co_name if code.co_filename.startswith(_COMMUNICATION) else ""
    return ""


def _names_on_line(code: CodeType, instruction: int) -> set[str]:
    """Return the names that the line of an instruction looks up."""
    lines = list(code.co_lines())  # a line may have several ranges
    own = {number for start, end, number in lines if start <= instruction < end}
    spans = [(start, end) for start, end, number in lines if number in own]
    return {
        each.argval
        for each in dis.get_instructions(code)
        if isinstance(each.argval, str) and any(s <= each.offset < e for s, e in spans)
    }
