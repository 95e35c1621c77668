"""Origin of an error: a call that waits for other ranks, a data loader, or the user's code.

Gloo raises plain RuntimeErrors, like errors of wrong shapes. The raising code (C or Python) and the
function being called tell them apart.
"""

from __future__ import annotations

import dis
import pickle
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import CodeType

import torch

from gradwire.recorder.lines import Location, is_users

_MOST = 16  # maximum length of a chain
_COMMUNICATION = (
    str(Path(torch.__file__).parent / "distributed") + "/",
    str(Path(__file__).parents[1]) + "/",
)
_LOADING = str(Path(torch.__file__).parent / "utils" / "data") + "/"
_WAITS = {"result", "synchronize", "value", "wait", "wait_all"}
"""Methods of handles and futures that the user's own lines call."""
_OF_ARGUMENTS = (AttributeError, TypeError, pickle.PicklingError)
"""Errors that C code raises for its arguments, such as an object that cannot be pickled."""
_PLUMBING = {"wrapper", "inner", "_fn"}  # functions of decorators
_RAISE = {dis.opmap["RAISE_VARARGS"], dis.opmap["RERAISE"]}


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
    """Return True if C code raised the error in a call that may wait for other ranks.

    False for errors from backward, where the origin cannot be decided.
    """
    trace = trace_of(error)
    if not trace or isinstance(error, _OF_ARGUMENTS):
        return False
    if raised_in_python(error):
        return False
    code, instruction = trace[-1]
    if is_users(code.co_filename):
        return not _WAITS.isdisjoint(_names_on_line(code, instruction))
    return code.co_filename.startswith(_COMMUNICATION)


def raised_in_python(error: BaseException) -> bool:
    """Return True if a `raise` statement raised the error, not code in C."""
    trace = trace_of(error)
    return bool(trace) and trace[-1][0].co_code[trace[-1][1]] in _RAISE


def came_from_loading(error: BaseException) -> bool:
    """Return True if a data loader raised the error.

    When a worker has died, a signal handler raises it wherever the main thread is, even in a
    collective.
    """
    trace = trace_of(error)
    return bool(trace) and trace[-1][0].co_filename.startswith(_LOADING)


def called_by_user(locations: Sequence[Location]) -> str:
    """Return the torch.distributed function that the user's innermost line called; "" if none.

    Args:
        locations: Frames, innermost first.
    """
    called = ""
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
