"""Rules that the source follows and no linter checks."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import gradwire

SOURCE = Path(gradwire.__file__).parent
MAKERS = frozenset({"arange", "empty", "eye", "full", "ones", "rand", "randn", "tensor", "zeros"})
EXEMPT = frozenset({"ddp/buckets/ownership.py"})
"""Counts references to tensors, whatever they hold."""


def test_tensors_do_not_follow_the_default_dtype() -> None:
    """A count or a message in the default dtype is rounded where that is float16 or bfloat16."""
    without = []
    for path in sorted(SOURCE.rglob("*.py")):
        name = path.relative_to(SOURCE).as_posix()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            of_torch = isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"
            given = {keyword.arg for keyword in node.keywords}
            if of_torch and node.func.attr in MAKERS and given.isdisjoint({"dtype", None}):
                without.append(f"{name}:{node.lineno}: {ast.unparse(node)}")
    assert [line for line in without if line.split(":")[0] not in EXEMPT] == []


FACES = frozenset({"recorder.trace", "recorder.verdict"})
"""Subpackages that other packages load when they need them, beside the packages themselves."""


def test_packages_import_each_other_through_their_faces() -> None:
    """A package's modules may change as long as the names in its `__init__` stay."""
    packages = {path.parent.name for path in SOURCE.glob("*/__init__.py")}
    past = []
    for path in sorted(SOURCE.rglob("*.py")):
        name = path.relative_to(SOURCE).as_posix()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.ImportFrom) or node.module is None:
                continue
            imported = node.module.removeprefix("gradwire.")
            package, _, module = imported.partition(".")
            foreign = package in packages and package != name.split("/")[0]
            if module not in ("", "__main__") and foreign and imported not in FACES:
                past.append(f"{name}:{node.lineno}: from {node.module}")
    assert past == []


def test_pages_name_files_that_exist() -> None:
    root = Path(__file__).parents[2]
    folders = ("src", "tests", "benchmarks", "docs", "examples", ".ci")
    files = [f"/{p.relative_to(root)}" for folder in folders for p in (root / folder).rglob("*.py")]
    gone = {
        f"{page.relative_to(root)}: {name}"
        for page in [*(root / "docs").rglob("*.md"), root / "README.md", root / "CONTRIBUTING.md"]
        for name in re.findall(r"`([\w/]+/\w+\.py)`", page.read_text(encoding="utf-8"))
        if not any(file.endswith(f"/{name}") for file in files)
    }
    assert gone == set()
