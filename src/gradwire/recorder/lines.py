"""Lines of the user's code: cheap to capture during a call, resolved when a dump is written.

A frame is stored as its code object and last instruction; the line number is computed on reading.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, FrameType

Location = tuple[CodeType, int]
"""A code object and an instruction in it."""
Line = dict[str, str | int]
"""A line in the format of torch's flight recorder: keys "name" (function), "filename", "line"."""

_USER, _LIBRARY, _OURS = 0, 1, 2
_LIMIT = 64  # maximum number of frames to visit
_TORCH = find_spec("torch")  # not imported: to explain dumps, it is not needed
_OUR_FOLDERS = (
    str(Path(_TORCH.origin).parent if _TORCH and _TORCH.origin else "torch") + os.sep,
    str(Path(__file__).parents[1]) + os.sep,
    str(Path(__file__).parents[2] / "gradwire_autoload.py"),
)
_INSTALLED = ("stdlib", "platstdlib", "purelib", "platlib", "scripts")
_LIBRARY_FOLDERS = (
    "<frozen ",
    *(sysconfig.get_path(name) + os.sep for name in _INSTALLED),
)
_depths: dict[str, tuple[int, CodeType]] = {}
"""Depth and code of the frame just inside the user's, by the name of the operation."""
_kinds: dict[str, int] = {}
"""Kind of code by file name. Strings cache their hashes, code objects do not."""


def caller(op: str, depth: int) -> Location:
    """Return the user's innermost frame that led to a call, a package's, or the innermost."""
    # Most calls of an op pass through the same frames, so the user's frame is first looked up at
    # the last depth. This saves 2 µs over a walk outwards, which creates an object per frame.
    # `depth` counts frames to skip, including the caller of this function.
    found = _depths.get(op)
    if found is not None:
        last, code = found
        try:
            frame = sys._getframe(last)
        except ValueError:  # the stack is shallower
            return _walk(op, depth + 1)
        if frame.f_code is code:
            outer = frame.f_back
            if outer is not None and _kinds.get(outer.f_code.co_filename) == _USER:
                return outer.f_code, outer.f_lasti
    return _walk(op, depth + 1)


def _walk(op: str, depth: int) -> Location:
    at: FrameType | None = sys._getframe(depth)
    assert at is not None
    inner = innermost = at
    other: FrameType | None = None
    for number in range(depth, depth + _LIMIT):
        code = at.f_code
        kind = _classify(code.co_filename)
        if kind == _USER:
            if inner is not at:
                _depths[op] = number - 2, inner.f_code  # depth relative to `caller`
            return code, at.f_lasti
        if kind == _LIBRARY and other is None:
            other = at
        if at.f_back is None:
            break
        inner, at = at, at.f_back
    found = other or innermost
    return found.f_code, found.f_lasti


class MainThread:
    """Lines of the main thread, as the recorder's thread sees them a few times per second."""

    # stack, innermost first, its time in ns, and since when the user's innermost line is the same
    stack: Sequence[Location] = ()
    seen = since = 0

    @classmethod
    def look(cls, now: int) -> None:
        """Update both."""
        stack = main_stack()
        if users_line(stack) != users_line(cls.stack):
            cls.since = now
        cls.stack, cls.seen = stack, now


def main_stack() -> list[Location]:
    """Return all frames of the main thread, from the innermost one outwards."""
    return call_stack(sys._current_frames().get(threading.main_thread().ident or 0))


def users_line(stack: Sequence[Location]) -> Location | None:
    """Return the user's innermost line of a stack."""
    return next((at for at in stack if is_users(at[0].co_filename)), None)


def call_stack(frame: FrameType | None) -> list[Location]:
    """Return all frames from this one outwards."""
    found = []
    while frame is not None:
        found.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return found


def read_stack(locations: list[Location]) -> list[Line]:
    """Return the lines with the user's own code first and other packages last."""
    ordered = sorted(locations, key=lambda location: _classify(location[0].co_filename))
    return [read_line(location) for location in ordered]


def read_line(location: Location) -> Line:
    """Return the line of a frame."""
    code, instruction = location
    line = code.co_firstlineno
    for start, end, number in code.co_lines():
        if start <= instruction < end and number is not None:
            line = number
    return {"name": code.co_name, "filename": code.co_filename, "line": line}


def marked(locations: Sequence[Location]) -> list[Line]:
    """Return the lines, each with a key "user" that is True if it is the user's own code."""
    return [read_line(at) | {"user": is_users(at[0].co_filename)} for at in locations]


def is_users(filename: str) -> bool:
    """Return True if a file is not part of PyTorch, gradwire, Python or an installed package."""
    return _classify(filename) == _USER


def _classify(filename: str) -> int:
    kind = _kinds.get(filename)
    if kind is None:
        kind = _USER
        if filename.startswith(_OUR_FOLDERS):
            kind = _OURS
        elif filename.startswith(_LIBRARY_FOLDERS) or f"{os.sep}site-packages{os.sep}" in filename:
            kind = _LIBRARY
        if len(_kinds) > 10_000:  # the program compiles code under new names all the time
            _kinds.clear()
        _kinds[filename] = kind
    return kind
