"""Every example runs: the blocks of the docs' pages, and the `>>>` of the docstrings.

A page's blocks run in order, in one namespace and one empty directory: `python` is executed, or
written to a file when it has a title; `pycon` must print what it shows; `sh` must end with 0.
Other languages are for reading only, as is a block whose first line is "# not run: <reason>".
"""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import gradwire
from gradwire.testing import run_ranks

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^```(\w*)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
TITLE = re.compile(r'title="([^"]+)"')
KNOWN = {"torch": torch, "dist": dist, "run_ranks": run_ranks}
"""What every docstring's example may use without importing it."""
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    language: str
    title: str | None
    text: str


def blocks(page: str, content: str) -> list[Block]:
    found = []
    for match in FENCE.finditer(content):
        language, info, text = match.groups()
        if language in {"python", "pycon", "sh"} and not re.match(r"# not run: \S", text):
            title = TITLE.search(info)
            line = content.count("\n", 0, match.start()) + 1
            found.append(Block(page, line, language, title and title[1], text))
    return found


def run_doctest(test: doctest.DocTest) -> None:
    report: list[str] = []
    runner = doctest.DocTestRunner(verbose=False, optionflags=FLAGS)
    runner.run(test, out=report.append, clear_globs=False)
    assert not report, "".join(report)


def run_block(block: Block, directory: Path, namespace: dict[str, Any]) -> None:
    if block.title:
        (directory / block.title).write_text(block.text, encoding="utf-8")
    elif block.language == "python":
        code = compile("\n" * block.line + block.text, block.page, "exec")
        exec(code, namespace)
    elif block.language == "pycon":
        test = doctest.DocTestParser().get_doctest(
            block.text, namespace, block.page, block.page, block.line
        )
        test.globs = namespace  # not a copy: later blocks use what this one binds
        run_doctest(test)
    else:
        path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
        subprocess.run(
            ["bash", "-euo", "pipefail", "-c", block.text],
            cwd=directory,
            env={"PATH": path, "HOME": str(directory)},
            check=True,
            timeout=90,
        )


def page_blocks(path: Path) -> list[Block]:
    found = blocks(str(path.relative_to(ROOT)), path.read_text(encoding="utf-8"))
    if path.name == "README.md":  # .ci/run runs its commands for contributors, the last two
        commands = [block for block in found if block.language == "sh"][-2:]
        found = [block for block in found if block not in commands]
    return found


MODULES = [
    pytest.param(module.name)
    for module in pkgutil.walk_packages(gradwire.__path__, "gradwire.")
    if not module.name.endswith("__main__")
]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LONG_PAGES = {"test.md", "hosts.md", "slow-networks.md", "elastic.md", "tutorial.md"}
"""What these show starts processes on several hosts, or many of them, or trains for seconds."""


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(
            page,
            id=str(page.relative_to(ROOT)),
            marks=pytest.mark.wide if page.name in LONG_PAGES else (),
        )
        for page in PAGES
        if page_blocks(page)
    ],
)
def test_a_page_s_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {"__name__": "example"}
    for block in page_blocks(page):
        run_block(block, tmp_path, namespace)


@pytest.mark.parametrize("name", MODULES)
def test_a_module_s_docstrings_print_what_they_show(name: str) -> None:
    for test in doctest.DocTestFinder().find(importlib.import_module(name)):
        test.globs = KNOWN | test.globs
        run_doctest(test)
