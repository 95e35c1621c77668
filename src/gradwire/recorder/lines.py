"""Which lines of the user's code led to a call: cheap to take, read in full when they are needed.

A frame is kept as its code object and its last instruction; the number of the line is found when
somebody reads it.
"""

from __future__ import annotations

import ast
import sys
import sysconfig
import threading
from functools import lru_cache
from pathlib import Path
from types import CodeType, FrameType

import torch

Place = tuple[CodeType, int]
"""A code object and the instruction in it."""
Line = dict[str, str | int]
"""As torch's flight recorder has it: the function's "name", the "filename", and the "line"."""

_USER, _LIBRARY, _OURS = 0, 1, 2
_MAX_BYTES = 1 << 22  # of a source file that is read
_LIMIT = 64  # frames that are looked at
_OUR_FOLDERS = (
    str(Path(torch.__file__).parent) + "/",
    str(Path(__file__).parents[1]) + "/",
    str(Path(__file__).parents[2] / "gradwire_autoload.py"),
)
_INSTALLED = ("stdlib", "platstdlib", "purelib", "platlib", "scripts")
_LIBRARY_FOLDERS = (
    "<frozen ",
    *(sysconfig.get_path(name) + "/" for name in _INSTALLED),
)
_depths: dict[str, tuple[int, CodeType]] = {}
"""For what is called: how far out the frame inside of the user's was, and its code."""
_kinds: dict[str, int] = {}
"""By file name: a string knows its hash, a code object computes its own each time."""


def caller(op: str, depth: int) -> Place:
    """The innermost frame of the user's own code that led to a call.

    Args:
        op: What is called. Most calls of it come through the same frames, so that the user's is
            looked for where it was the last time: 2 µs less than a walk outwards, which makes an
            object of each frame.
        depth: How many frames to leave out, this function's caller being one.

    Returns:
        Where there is none of the user's, that of another package than PyTorch and gradwire, or
        the innermost.
    """
    found = _depths.get(op)
    if found is not None:
        last, code = found
        try:
            frame = sys._getframe(last)
        except ValueError:  # there are not so many
            return _walk(op, depth + 1)
        if frame.f_code is code:
            outer = frame.f_back
            if outer is not None and _kinds.get(outer.f_code.co_filename) == _USER:
                return outer.f_code, outer.f_lasti
    return _walk(op, depth + 1)


def _walk(op: str, depth: int) -> Place:
    at: FrameType | None = sys._getframe(depth)
    assert at is not None
    inner = innermost = at
    other: FrameType | None = None
    for number in range(depth, depth + _LIMIT):
        code = at.f_code
        kind = _classify(code.co_filename)
        if kind == _USER:
            if inner is not at:
                _depths[op] = number - 2, inner.f_code  # as seen from `caller`
            return code, at.f_lasti
        if kind == _LIBRARY and other is None:
            other = at
        if at.f_back is None:
            break
        inner, at = at, at.f_back
    found = other or innermost
    return found.f_code, found.f_lasti


def call_stack(frame: FrameType | None) -> list[Place]:
    """All frames from this one outwards."""
    found = []
    while frame is not None:
        found.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return found


def read_stack(places: list[Place]) -> list[Line]:
    """The lines, those of other packages last: the first is the user's own, if one is."""
    ordered = sorted(places, key=lambda place: _classify(place[0].co_filename))
    return [read_line(place) for place in ordered]


def read_line(place: Place) -> Line:
    """The line of a frame."""
    code, instruction = place
    line = code.co_firstlineno
    for start, end, number in code.co_lines():
        if start <= instruction < end and number is not None:
            line = number
    return {"name": code.co_name, "filename": code.co_filename, "line": line}


def thread_stacks(*, without: str) -> dict[str, list[Line]]:
    """Where each thread is: its frames, the innermost first; the main thread's first.

    Args:
        without: The name of a thread that is left out.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    stacks = {}
    for ident, frame in sys._current_frames().items():
        name = names.get(ident, str(ident))
        if name != without:
            stacks[name] = [
                read_line(place) | {"user": is_users(place[0].co_filename)}
                for place in call_stack(frame)
            ]
    main = threading.main_thread().name
    return dict(sorted(stacks.items(), key=lambda item: item[0] != main))


def is_users(filename: str) -> bool:
    """Whether a file is neither of PyTorch, gradwire, Python nor an installed package."""
    return _classify(filename) == _USER


def _classify(filename: str) -> int:
    kind = _kinds.get(filename)
    if kind is None:
        kind = _USER
        if filename.startswith(_OUR_FOLDERS):
            kind = _OURS
        elif filename.startswith(_LIBRARY_FOLDERS) or "/site-packages/" in filename:
            kind = _LIBRARY
        if len(_kinds) > 10_000:  # a program that compiles code under ever new names
            _kinds.clear()
        _kinds[filename] = kind
    return kind


def swallowing_handler(filename: str, line: int) -> int | None:
    """The line of an `except` that goes on after an error in a line, if there is one."""
    tree = _parse(filename)
    if tree is None:
        return None
    found = None
    for node in ast.walk(tree):  # the innermost comes last
        if not isinstance(node, ast.Try) or not node.body:
            continue
        end = node.body[-1].end_lineno or 0
        if node.body[0].lineno <= line <= end:
            for handler in node.handlers:
                if not any(isinstance(inner, ast.Raise) for inner in ast.walk(handler)):
                    found = handler.lineno
    return found


@lru_cache(maxsize=64)
def _parse(filename: str) -> ast.AST | None:
    path = Path(filename)
    try:
        if not path.is_file() or path.stat().st_size > _MAX_BYTES:
            return None
        return ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None
