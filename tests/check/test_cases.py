"""A mistake in a small program (`cases.txt`) is found, with its line, and nothing after repair."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from check.common import check

# Lines that end with `#-` are only in the wrong program, and those with `#+` only in the repaired
# one. A finding has to name a line with `!`.
_MARK = re.compile(r"#([-+]?)(!?)$")


def _read() -> dict[str, tuple[list[str], str]]:
    """Return the names and texts of the checks' programs, by kind and name."""
    parts = re.split(r"^=== (.*)\n", Path(__file__).with_name("cases.txt").read_text(), flags=re.M)
    prelude = parts[2]
    heads = [head.split() for head in parts[3::2]]
    return {
        f"{kind}-{name}": (checks.split(","), prelude + text)
        for (kind, name, checks), text in zip(heads, parts[4::2], strict=True)
    }


CASES = _read()
ALSO = ("random-state",)


def written(text: str, sign: str, file: Path) -> list[str]:
    """Write the wrong (`-`) or repaired (`+`) program, and return the lines to be found."""
    lines = [
        line
        for line in text.splitlines()
        if (m := _MARK.search(line)) is None or m[1] in ("", sign)
    ]
    file.write_text("\n".join(lines))
    return [f"{file}:{n}" for n, line in enumerate(lines, 1) if (m := _MARK.search(line)) and m[2]]


def _run(file: str) -> None:
    runpy.run_path(file)


# a few run each time
SOME = ["local-method", "local-forward_in_no_sync", "scale-helper", "hand-sum", "state-codebook"]


@pytest.mark.narrow({"name": SOME})
@pytest.mark.parametrize("name", CASES)
def test_a_mistake_is_found(name: str, tmp_path: Path) -> None:
    checks, text = CASES[name]
    places = written(text, "-", tmp_path / "train.py")
    only = [c for c in checks if c in ALSO]
    findings, _, _ = check(_run, str(tmp_path / "train.py"), only=only)
    assert {f.check for f in findings} == set(checks), findings
    assert all(f.line in places for f in findings), (places, findings)


@pytest.mark.wide
@pytest.mark.parametrize("name", CASES)
def test_nothing_is_found_after_repair(name: str, tmp_path: Path) -> None:
    checks, text = CASES[name]
    written(text, "+", tmp_path / "train.py")
    only = [c for c in checks if c in ALSO]
    findings, _, _ = check(_run, str(tmp_path / "train.py"), only=only)
    assert findings == []
