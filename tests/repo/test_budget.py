"""The budget of code lines and files, for each package: the numbers may only fall.

A code line has a token that is neither comment nor docstring. A commit that removes code lowers the
numbers; one that adds code says in its message what it replaces, and removes as much.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

import gradwire

SOURCE = Path(gradwire.__file__).parent

BUDGET = {  # package: (code lines, files)
    "": (981, 14),  # modules at the top level
    "buckets": (108, 2),
    "check": (1699, 8),
    "cli": (926, 10),
    "collectives": (2461, 10),
    "compat": (844, 6),
    "ddp": (4702, 21),
    "devices": (1150, 6),
    "elastic": (2629, 11),
    "hooks": (924, 7),
    "local_sgd": (500, 3),
    "optim": (604, 3),
    "recorder": (3920, 20),
    "shm": (4531, 21),
    "testing": (763, 4),
}
NO_CODE = {
    tokenize.COMMENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
    tokenize.INDENT,
    tokenize.NEWLINE,
    tokenize.NL,
}


def code_lines(source: str) -> int:
    """Return the number of lines with a token that is neither comment nor docstring."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            lines.difference_update(range(node.lineno, (node.end_lineno or 0) + 1))
    return len(lines)


def files_of(package: str) -> list[Path]:
    return sorted((SOURCE / package).rglob("*.py") if package else SOURCE.glob("*.py"))


def test_every_package_has_a_budget() -> None:
    packages = {path.parent.name for path in SOURCE.glob("*/__init__.py")}
    assert packages == set(BUDGET) - {""}


@pytest.mark.parametrize("package", BUDGET)
def test_code_stays_within_its_budget(package: str) -> None:
    files = files_of(package)
    code = sum(code_lines(path.read_text(encoding="utf-8")) for path in files)
    most_code, most_files = BUDGET[package]
    assert code <= most_code
    assert len(files) <= most_files


def test_the_comparison_tells_the_size() -> None:
    page = Path(__file__).parents[2] / "docs" / "comparison.md"
    (told,) = re.findall(r"([\d,]+) lines of code", page.read_text(encoding="utf-8"))
    assert abs(int(told.replace(",", "")) - sum(code for code, _ in BUDGET.values())) <= 1000
