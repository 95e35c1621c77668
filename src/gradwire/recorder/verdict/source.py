"""What the program's text says about a line: whether an error in it may have been swallowed."""

from __future__ import annotations

import ast
from functools import lru_cache
from pathlib import Path

__all__ = ["swallowing_handler"]

_MAX_BYTES = 1 << 22


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
