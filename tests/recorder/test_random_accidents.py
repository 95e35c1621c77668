"""Random accidents: the verdict never names an innocent rank.

Programs, culprit, groups, backend, hosts and lost dumps are random
(`programs/random_programs.py`). GRADWIRE_LONG=1 runs 320 accidents, in half an hour.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

LONG = os.environ.get("GRADWIRE_LONG") == "1"
PROGRAM = Path(__file__).parent / "programs" / "random_accident.py"
AT_ONCE = 4
EACH = 80 if LONG else 3
FIRST = 1000

pytestmark = [pytest.mark.wide, pytest.mark.timeout(7200 if LONG else 300)]

NAMED = {
    "busy_loop",
    "endless_loop",
    "exits",
    "fewer_batches",
    "long_sleep",
    "no_memory",
    "raises",
    "segfault",
    "skip",
    "stopped",
    "swap",
}
"""Accidents that the dumps of three or more ranks explain: the verdict must name the culprit."""


def test_verdict_never_names_an_innocent_rank(tmp_path):
    command = [sys.executable, str(PROGRAM), str(tmp_path)]
    started = [
        subprocess.Popen(
            [*command, str(FIRST + EACH * part), str(EACH)],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for part in range(AT_ONCE)
    ]
    try:
        found = [
            json.loads(line) for each in started for line in each.communicate()[0].splitlines()
        ]
    finally:
        for each in started:
            each.kill()
            each.wait()
    assert len(found) == AT_ONCE * EACH
    assert [case for case in found if case["result"] not in ("right", "unsaid")] == []
    shown = [c for c in found if c["accident"] in NAMED and c["world"] > 2 and not c["hosts"]]
    assert shown
    assert [case for case in shown if case["result"] != "right"] == []
