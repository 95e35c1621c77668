"""Lines of the user's code: cheap to capture during a call, resolved when a dump is written.

A frame is stored as its code object and last instruction; the line number is computed on reading.
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

Location = tuple[CodeType, int]
"""A code object and an instruction in it."""
Line = dict[str, str | int]
"""A line in the format of torch's flight recorder: keys "name" (function), "filename", "line"."""

_USER, _LIBRARY, _OURS = 0, 1, 2
_MAX_BYTES = 1 << 22  # limit on source files to parse
_LIMIT = 64  # maximum number of frames to visit
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
"""Depth and code of the frame just inside the user's, by the name of the operation."""
_kinds: dict[str, int] = {}
"""Kind of code by file name. Strings cache their hashes, code objects do not."""


def caller(op: str, depth: int) -> Location:
    """Return the innermost frame of the user's own code that led to a call.

    Args:
        op: Name of the operation. Most of its calls pass through the same frames, so the user's
            frame is first looked up at the last depth. This saves 2 µs over a walk outwards,
            which creates an object per frame.
        depth: Number of frames to skip, including the caller of this function.

    Returns:
        Frame of the user's code; else of a package other than PyTorch and gradwire; else the
        innermost frame.
    """
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


def thread_stacks(*, without: str) -> dict[str, list[Line]]:
    """Return the frames of each thread, innermost first; the main thread comes first.

    Args:
        without: Name of a thread to omit.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    stacks = {}
    for ident, frame in sys._current_frames().items():
        name = names.get(ident, str(ident))
        if name != without:
            stacks[name] = [
                read_line(location) | {"user": is_users(location[0].co_filename)}
                for location in call_stack(frame)
            ]
    main = threading.main_thread().name
    return dict(sorted(stacks.items(), key=lambda item: item[0] != main))


def is_users(filename: str) -> bool:
    """Return True if a file is not part of PyTorch, gradwire, Python or an installed package."""
    return _classify(filename) == _USER


def _classify(filename: str) -> int:
    kind = _kinds.get(filename)
    if kind is None:
        kind = _USER
        if filename.startswith(_OUR_FOLDERS):
            kind = _OURS
        elif filename.startswith(_LIBRARY_FOLDERS) or "/site-packages/" in filename:
            kind = _LIBRARY
        if len(_kinds) > 10_000:  # the program compiles code under new names all the time
            _kinds.clear()
        _kinds[filename] = kind
    return kind


def swallowing_handler(filename: str, line: int) -> int | None:
    """Return the line of an `except` without `raise` that would catch an error in a line."""
    tree = _parse(filename)
    if tree is None:
        return None
    found = None
    for node in ast.walk(tree):  # breadth-first: the innermost comes last
        if not isinstance(node, ast.Try) or not node.body:
            continue
        end = node.body[-1].end_lineno or 0
        if node.body[0].lineno <= line <= end:
            for handler in node.handlers:
                if not any(isinstance(inner, ast.Raise) for inner in ast.walk(handler)):
                    found = handler.lineno
    return found


def is_conditional(filename: str, line: int) -> bool:
    """Return True if a line is in a loop, or under a condition in a function."""
    tree = _parse(filename)
    if tree is None:
        return False
    loops = ast.For | ast.While | ast.AsyncFor
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if not isinstance(body, list) or not body:
            continue
        inside = body[0].lineno <= line <= (body[-1].end_lineno or 0)
        if inside and isinstance(node, loops):
            return True
        if inside and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            branches = (each for each in ast.walk(node) if isinstance(each, ast.If))
            if any(each.lineno <= line <= (each.end_lineno or 0) for each in branches):
                return True
    return False


@lru_cache(maxsize=64)
def _parse(filename: str) -> ast.AST | None:
    path = Path(filename)
    try:
        if not path.is_file() or path.stat().st_size > _MAX_BYTES:
            return None
        return ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None
