"""Nothing is found in programs without a mistake, and observing changes none of their results."""

from __future__ import annotations

import pytest

from check.common import check, run_plain
from check.correct import PROGRAMS, RANKS

EACH_TIME = {"weights"}
CASES = [
    pytest.param(name, marks=() if name in EACH_TIME else pytest.mark.wide) for name in PROGRAMS
]


@pytest.mark.parametrize("name", CASES)
def test_nothing_is_found_and_nothing_changes(name: str) -> None:
    ranks = RANKS.get(name, 2)
    findings, observed, _ = check(PROGRAMS[name], ranks=ranks)
    assert findings == []
    assert observed == run_plain(PROGRAMS[name], ranks=ranks)
