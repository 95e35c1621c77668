"""The language of docstrings, comments, messages and pages, as far as a program can check it.

A docstring's first line begins with an imperative verb or is a noun phrase; predicates begin with
"Return True if". Entries of `Args` and `Attributes` begin with a noun.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CODE = ["src", "benchmarks", "examples"]
PAGES = ["docs", "README.md", "CONTRIBUTING.md"]

FIRST_WORDS = re.compile(
    r"(What|Whether|Who|Whose|As|Of|Those|How|Which|Where|When|It is|There (is|are)|From|To)\b"
)
"""Words that begin a clause where a verb or a noun is expected."""

ENTRY = re.compile(
    r"^(?P<name>\*{0,2}\w[\w`*]*(, \*{0,2}\w+)*): "
    r"(?P<words>(Whether|Of|What|Who|Whose|As|Those|How|Which|Where|When|It is)\b.*)$"
)
"""An entry of a docstring's section that begins with such a word."""

IDIOMS = [
    r"what is told",
    r"\b(is|are) told of\b",
    r"\b(hear|hears|heard) of (it|them|that|this|its|their|another|a rank)\b",
    r"the (backward|forward|step|round|epoch) (before|after)[.,;:)]",
    r"^who looks\b",
    r"\bwho (comes|goes|leaves|waits|looks|sends)\b",
    r"\bwhat (does|did|do) not come\b",
    r"\bwhose doing\b",
    r"\bwithout a word\b",
    r"\bof no effect\b",
    r"\bmakes of an?\b",
    r"\bgoes by\b",
    r"\bby turns\b",
    r"\ball that is said\b",
    r"\bthat is no\b",
    r"\bthat are no\b",
    r"\bnobody's\b",
    r"\bmended\b",
    r"\bas (torch|pytorch)'s do(es)?\b",
]
"""Phrases that PyTorch's, JAX's or MPI's documentation would put in other words."""

IDIOM = re.compile("|".join(IDIOMS), re.IGNORECASE)


def files(root: str) -> list[Path]:
    path = ROOT / root
    return [path] if path.is_file() else sorted([*path.rglob("*.py"), *path.rglob("*.md")])


@cache
def docstrings(path: Path) -> list[tuple[int, str]]:
    """Return the line and the text of each docstring, attributes' included."""
    return list(_docstrings(path))


def _docstrings(path: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            for statement in node.body:
                if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                    text = statement.value.value
                    if isinstance(text, str):
                        yield statement.lineno, text.strip()


def place(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT)}:{line}"


@pytest.mark.parametrize("folder", CODE)
def test_docstrings_begin_with_a_verb_or_a_noun(folder: str) -> None:
    found = [
        f"{place(path, line)}: {text.splitlines()[0]}"
        for path in files(folder)
        for line, text in docstrings(path)
        if FIRST_WORDS.match(text)
    ]
    assert found == []


@pytest.mark.parametrize("folder", CODE)
def test_entries_of_docstrings_begin_with_a_noun(folder: str) -> None:
    found = [
        f"{place(path, line + number)}: {match['name']}: {match['words']}"
        for path in files(folder)
        for line, text in docstrings(path)
        for number, words in enumerate(text.splitlines())
        if (match := ENTRY.match(words.strip()))
    ]
    assert found == []


@pytest.mark.parametrize("root", CODE + PAGES)
def test_banned_idioms_do_not_occur(root: str) -> None:
    found = [
        f"{place(path, number)}: {line.strip()}"
        for path in files(root)
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if IDIOM.search(line)
    ]
    assert found == []
