"""Source of a user's program around a line: handlers that swallow errors, loops and conditions."""

from __future__ import annotations

import ast
from functools import lru_cache
from pathlib import Path

_MAX_BYTES = 1 << 22  # limit on source files to parse


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
