"""The tests of `test_everywhere.py`, with what macOS and Windows lack hidden from gradwire."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
FILE = HERE / "test_everywhere.py"
SOURCE = HERE.parents[1] / "src"


@pytest.mark.timeout(300)
@pytest.mark.narrow({"system": "win32", "marks": "not wide"})
@pytest.mark.parametrize("marks", ["not wide", ""])
@pytest.mark.parametrize("system", ["win32", "darwin"])
def test_all_works_without_what_the_system_lacks(system: str, marks: str, tmp_path: Path) -> None:
    paths = [str(HERE / "hidden"), str(SOURCE), os.environ.get("PYTHONPATH", "")]
    tests = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", marks, FILE],
        env=os.environ
        | {"SEEN_SYSTEM": system, "PYTHONPATH": os.pathsep.join(paths), "TMPDIR": str(tmp_path)}
        | {"LC_ALL": "C", "PYTHONUTF8": "0"},  # files without an encoding are ASCII
        cwd=HERE.parents[1],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=290,
        check=False,
    )
    assert tests.returncode == 0, tests.stdout
