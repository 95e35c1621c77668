"""Verdicts on staged accidents, whose truth is stated in `accidents.py`: none may be wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from accidents.accidents import QUICK

ROOT = Path(__file__).parents[2]
DRAWN = 24
SEED = 2000


def staged(site: Path, *arguments: str, seconds: float) -> list[dict[str, Any]]:
    """Return the results of `python -m tests.accidents`."""
    path = os.pathsep.join([str(site), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "tests.accidents", "--json", *arguments]
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("GRADWIRE_", "TORCH_"))}
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=kept | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            out, _ = process.communicate(timeout=seconds)
        except BaseException:
            process.terminate()  # not killed: it ends what it has started
            process.wait()
            raise
    return [json.loads(line) for line in out.splitlines() if line.startswith("{")]


@pytest.fixture(scope="module")
def quick(site: Path) -> dict[str, dict[str, Any]]:
    return {each["accident"]: each for each in staged(site, "--quick", seconds=110)}


@pytest.mark.wide
@pytest.mark.parametrize("name", QUICK)
def test_verdict_on_one_accident_of_each_family(quick, name):
    assert quick[name]["result"] == "right", quick[name]


@pytest.mark.wide
@pytest.mark.timeout(600)
def test_no_verdict_on_a_drawn_accident_names_an_innocent_rank(site):
    drawn = ["--seed", str(SEED), "--count", str(DRAWN), "--at-once=4", "--hosts"]
    found = staged(site, *drawn, seconds=560)
    assert len(found) == DRAWN
    wrong = [each for each in found if "WRONG" in (each["result"], each["on two hosts"])]
    assert not wrong, wrong
    others = [each for each in found if each["result"] != "right"]
    assert len(others) <= DRAWN // 10, others
