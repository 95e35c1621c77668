"""Where an error came from: whether it came out of a call that waits for other ranks.

Gloo's errors are plain RuntimeErrors, as are those of a wrong shape. They are told apart by what
raised them, C or Python, and by what was being called.
"""

from __future__ import annotations

import dis
import pickle
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import CodeType

import torch

from gradwire.recorder.lines import Place, is_users

_MOST = 16  # errors of a chain
_COMMUNICATION = (
    str(Path(torch.__file__).parent / "distributed") + "/",
    str(Path(__file__).parents[1]) + "/",
)
_LOADING = str(Path(torch.__file__).parent / "utils" / "data") + "/"
_WAITS = {"result", "synchronize", "value", "wait", "wait_all"}
"""Methods of handles and futures, called from the user's own lines."""
_OF_ARGUMENTS = (AttributeError, TypeError, pickle.PicklingError)
"""What C code raises for its arguments, such as an object that cannot be pickled."""
_PLUMBING = {"wrapper", "inner", "_fn"}  # decorators' functions
_RAISE = {dis.opmap["RAISE_VARARGS"], dis.opmap["RERAISE"]}


def causes_of(error: BaseException) -> Iterator[BaseException]:
    """The errors that one was raised from, or while they were handled."""
    for _ in range(_MOST):
        inner = error.__cause__ or error.__context__
        if inner is None:
            return
        yield inner
        error = inner


def trace_of(error: BaseException) -> list[Place]:
    """An error's frames, the outermost first."""
    found, at = [], error.__traceback__
    while at is not None:
        found.append((at.tb_frame.f_code, at.tb_lasti))
        at = at.tb_next
    return found


def came_from_waiting(error: BaseException) -> bool:
    """Whether C code raised it, in a call that may wait for other ranks.

    Not said of errors out of backward, in which both may be.
    """
    trace = trace_of(error)
    if not trace or isinstance(error, _OF_ARGUMENTS):
        return False
    code, instruction = trace[-1]
    if code.co_code[instruction] in _RAISE:
        return False
    if is_users(code.co_filename):
        return not _WAITS.isdisjoint(_names_on_line(code, instruction))
    return code.co_filename.startswith(_COMMUNICATION)


def came_from_loading(error: BaseException) -> bool:
    """Whether a data loader raised it.

    It does so wherever the main thread is, in a collective, too: by a signal's handler, when a
    worker has died.
    """
    trace = trace_of(error)
    return bool(trace) and trace[-1][0].co_filename.startswith(_LOADING)


def called_by_user(places: Sequence[Place]) -> str:
    """The function of torch.distributed that the user's innermost line had called; "" if none.

    Args:
        places: The innermost first.
    """
    called = ""
    for code, _ in places:
        if is_users(code.co_filename):
            return called
        if code.co_name not in _PLUMBING:
            called = code.co_name if code.co_filename.startswith(_COMMUNICATION) else ""
    return ""


def _names_on_line(code: CodeType, instruction: int) -> set[str]:
    """What an instruction's line looks up."""
    lines = list(code.co_lines())  # of one line there may be several
    own = {number for start, end, number in lines if start <= instruction < end}
    spans = [(start, end) for start, end, number in lines if number in own]
    return {
        each.argval
        for each in dis.get_instructions(code)
        if isinstance(each.argval, str) and any(s <= each.offset < e for s, e in spans)
    }
