"""Verdicts with the user's lines if FSDP or a compiled module calls the collectives."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from gradwire.recorder.verdict import Kind, explain

PROGRAM = Path(__file__).parent / "programs" / "sharded.py"
EXPECTED = {"skip": Kind.MISMATCH, "raise": Kind.ERROR, "loop": Kind.MISSING}

pytestmark = [pytest.mark.wide, pytest.mark.timeout(120)]


def line_of(mark: str) -> str:
    lines = PROGRAM.read_text().splitlines()
    number = next(n for n, text in enumerate(lines, 1) if text.endswith(f"# here: {mark}"))
    return f"{PROGRAM}:{number}"


@pytest.mark.parametrize(
    ("backend", "wrapper", "accident"),
    [("gloo", "fsdp", "loop"), ("shm", "fsdp", "raise"), ("shm", "compiled", "skip")],
)
def test_verdict_names_rank_and_line(tmp_path, backend, wrapper, accident):
    launch = [sys.executable, "-m", "gradwire", "run", "--standalone", "--nproc-per-node", "3"]
    command = [*launch, "--recorder", str(tmp_path), str(PROGRAM), backend, wrapper, accident]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert ended.returncode != 0
    finding = explain(tmp_path).findings[0]
    assert (finding.kind, finding.ranks) == (EXPECTED[accident], (1,)), ended.stderr
    assert line_of(accident) in finding.places
    if accident != "raise":
        assert line_of("others") in finding.places
