"""PyTorch's own tests of DDP, as far as they run here: see RESULTS.md; `run.py` runs all."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
QUICK = 45


def results(path: Path) -> list[dict[str, Any]]:
    """What the last full run with one version of PyTorch wrote."""
    told: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    return told


def not_passed(path: Path) -> set[str]:
    """What passes with PyTorch's class and not with ours."""
    came = {(r["test"], r["ranks"], r["side"]): r["came"] for r in results(path)}
    passed = {(test, n) for (test, n, side), c in came.items() if (side, c) == ("torch", "passed")}
    assert len(passed) > 100
    return {test for test, n in passed if came[test, n, "gradwire"] != "passed"}


def private() -> set[str]:
    spec = importlib.util.spec_from_file_location("reasons", HERE / "reasons.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return set(module.PRIVATE)


def test_what_passes_with_pytorchs_class_passes_with_ours() -> None:
    """But for what has a reason; and no reason is without a test."""
    others = [not_passed(path) for path in sorted(HERE.glob("results-*.json"))]
    assert set().union(*others) == private()


@pytest.mark.wide
def test_the_quick_ones_pass() -> None:
    """On two ranks, those that took the least time when the results were made."""
    pytest.importorskip("expecttest", reason="PyTorch's tests import expecttest")
    command = [sys.executable, str(HERE / "run.py"), "--ranks", "2", "--sides", "gradwire"]
    ended = subprocess.run(
        [*command, "--quick", str(QUICK)], capture_output=True, text=True, timeout=110, check=False
    )
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-2000:]
    assert f"{QUICK} runs, 0 failures" in ended.stdout
