"""What CI runs: the versions that are said to be supported, all tests, whole packages."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

import pytest

from gradwire._torch import NEWEST_TESTED

pytest_plugins = ["pytester"]

ROOT = Path(__file__).parents[2]
WORKFLOW = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def matrix(name: str) -> list[str]:
    (row,) = re.findall(rf"^ +{name}: \[(.*)\]$", WORKFLOW, re.MULTILINE)
    return re.findall(r'"([\d.]+)"', row)


def test_the_oldest_and_the_newest_python_are_run() -> None:
    classifiers = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', PROJECT)
    (oldest,) = re.findall(r'requires-python = ">=(.*)"', PROJECT)
    assert matrix("python") == [oldest, classifiers[-1]]


def test_the_oldest_and_the_newest_torch_are_run() -> None:
    (oldest,) = re.findall(r'"torch>=2\.(\d+)"', PROJECT)
    minors = [int(version.split(".")[1]) for version in matrix("torch")]
    assert minors == [int(oldest), NEWEST_TESTED[1]]


TESTS = """
import pytest

@pytest.mark.narrow({"a": 1}, {"a": [2, 3], "b": 2})
@pytest.mark.parametrize("b", [1, 2])
@pytest.mark.parametrize("a", [1, 2, 3])
def test_some(a, b): pass

@pytest.mark.parametrize("each", [1, 2])
@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_by_turns(backend, each): pass

@pytest.mark.wide
def test_wide(): pass

def test_always(): pass
"""


@pytest.fixture
def suite(pytester: pytest.Pytester) -> pytest.Pytester:
    for name, content in (
        ("pyproject.toml", PROJECT.replace('testpaths = ["tests"]', "")),
        ("conftest.py", (ROOT / "tests" / "conftest.py").read_text(encoding="utf-8")),
        ("test_sample.py", TESTS),
    ):
        (pytester.path / name).write_text(content, encoding="utf-8")
    return pytester


def names(suite: pytest.Pytester, *options: str) -> list[str]:
    result = suite.runpytest_inprocess("--collect-only", "-q", *options)
    assert result.ret == 0
    return [line.partition("::")[2] for line in result.outlines if "::" in line]


def test_narrow_and_wide_tests_are_all_tests(suite: pytest.Pytester) -> None:
    narrow, wide = names(suite), names(suite, "-m", "wide")
    turns, others = (
        [f"test_by_turns[{x}]" for x in pair] for pair in (("gloo-1", "shm-2"), ("gloo-2", "shm-1"))
    )
    if turns[0] not in narrow:  # which comes first goes by the function's name
        turns, others = others, turns
    some = [f"test_some[{x}]" for x in ("1-1", "1-2", "2-2", "3-2")]
    assert narrow == [*some, *turns, "test_always"]
    assert wide == ["test_some[2-1]", "test_some[3-1]", *others, "test_wide"]
    assert sorted(names(suite, "-m", "")) == sorted(narrow + wide)


def test_tests_that_have_not_begun_in_time_are_skipped(suite: pytest.Pytester) -> None:
    suite.runpytest_inprocess("--seconds", "-1").assert_outcomes(skipped=7, deselected=5)
    suite.runpytest_inprocess("--seconds", "1e9").assert_outcomes(passed=7, deselected=5)


COMMAND = "gradwire = gradwire.cli:main"
LICENCE = "gradwire-1.dist-info/licenses/LICENSE"


def complaints(
    directory: Path, wheel: Iterable[str], sdist: Iterable[str], command: str = COMMAND
) -> str:
    with zipfile.ZipFile(directory / "gradwire-1-py3-none-any.whl", "w") as archive:
        archive.writestr("gradwire-1.dist-info/entry_points.txt", command)
        for name in wheel:
            archive.writestr(name, "")
    with tarfile.open(directory / "gradwire-1.tar.gz", "w:gz") as archive:
        for name in sdist:
            archive.add(ROOT / "LICENSE", f"gradwire-1/{name}")
    script = ROOT / ".ci" / "check_packages.py"
    checked = subprocess.run(
        [sys.executable, script, directory], capture_output=True, text=True, check=False, timeout=60
    )
    return checked.stdout + checked.stderr


def test_packages_that_lack_files_or_have_others_are_refused(tmp_path: Path) -> None:
    source = ROOT / "src"
    ours = {
        str(p.relative_to(source))
        for p in source.rglob("*")
        if p.is_file() and "__pycache__" not in p.parts
    }
    wheel = ours - {"gradwire/py.typed"} | {"tests/conftest.py"}
    said = complaints(tmp_path, wheel, ["src/gradwire/__pycache__/x.pyc", "PKG-INFO"], "")
    for complaint in (
        "py3-none-any.whl lacks gradwire/py.typed",
        f"py3-none-any.whl lacks {LICENCE}",
        "py3-none-any.whl should not have tests/conftest.py",
        "py3-none-any.whl has no command gradwire",
        "tar.gz lacks tests/repo/test_ci.py",
        "tar.gz lacks src/gradwire/py.typed",
        "tar.gz should not have src/gradwire/__pycache__/x.pyc",
    ):
        assert complaint in said
    assert "whl" not in complaints(tmp_path, ours | {LICENCE}, ["PKG-INFO"])
