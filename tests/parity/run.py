"""Runs PyTorch's own tests of DDP with PyTorch's class and with gradwire's, and compares.

    python tests/parity/run.py                 # all: 10 minutes; writes down what came of them
    python tests/parity/run.py --ranks 2 --sides gradwire --tests test_ddp_create_graph
    python tests/parity/run.py --ranks 2 --sides gradwire --quick 45   # those that take least time

The suite is that of the installed PyTorch. Results are kept for each of its versions, in
results-<version>.json, and RESULTS.md shows them all; `--write` puts those of some tests there too.

Ends with 1 if a test passes with PyTorch's class and not with gradwire's, and `reasons.py` does not
say why. Needs expecttest, which PyTorch's tests import.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from reasons import PRIVATE  # noqa: E402
from suite import names, run  # noqa: E402
from torch import __version__ as TORCH  # noqa: E402

from gradwire.errors import CollectiveTimeoutError  # noqa: E402
from gradwire.testing import RankError, run_ranks  # noqa: E402
from gradwire.testing.ranks import POOL  # noqa: E402

SIDES = ("torch", "gradwire")
LIMIT = 60.0
LIMITS = {"test_ddp_uneven_inputs": 300.0, "test_ddp_compile_static_graph": 300.0}
"""Seconds that a test may take."""


@dataclass(frozen=True)
class Outcome:
    test: str
    side: str
    ranks: int
    came: str
    why: str
    seconds: float


def attempt(name: str, side: str, ranks: int) -> tuple[str, str]:
    with tempfile.TemporaryDirectory() as scratch:
        for folder in ("barrier", "test_dir"):
            os.mkdir(os.path.join(scratch, folder))
        limit = LIMITS.get(name, LIMIT)
        try:
            outcomes: list[tuple[str, str]] = run_ranks(
                run, ranks, backend="gloo", timeout=limit, args=(name, side, scratch)
            )
        except RankError as error:
            return "failed", str(error)
        except CollectiveTimeoutError as error:
            return "hung", str(error)
    return outcomes[0]


def outcome(name: str, side: str, ranks: int) -> Outcome:
    """What came of a test; one that dies gets another chance, in processes without a past."""
    started = time.monotonic()
    came, why = attempt(name, side, ranks)
    if "was killed by" in why:
        POOL.close()
        started = time.monotonic()
        came, why = attempt(name, side, ranks)
    return Outcome(name, side, ranks, came, why, round(time.monotonic() - started, 1))


def run_all(tests: Sequence[str], sides: Sequence[str], ranks: Sequence[int]) -> list[Outcome]:
    """Every test on every number of ranks with every class; shows how it goes."""
    outcomes = []
    for count in ranks:
        for side in sides:
            os.environ["WORLD_SIZE"] = str(count)  # the suite reads it when it is imported
            POOL.close()
            for name in tests or names():
                result = outcome(name, side, count)
                outcomes.append(result)
                print(f"{count} ranks  {side:<9}{result.came:<8}{result.seconds:6.1f} s  {name}")
                if result.came in ("failed", "hung"):
                    print(result.why, flush=True)
    POOL.close()
    return outcomes


def unexplained(outcomes: Sequence[Outcome]) -> list[str]:
    """Tests that pass with PyTorch's class and not with ours, for no reason that is listed."""
    passed = {(o.test, o.ranks) for o in outcomes if o.side == "torch" and o.came == "passed"}
    return [
        f"{o.test} on {o.ranks} ranks: {o.came}"
        for o in outcomes
        if o.side == "gradwire"
        and o.came != "passed"
        and (o.test, o.ranks) in passed
        and o.test not in PRIVATE
    ]


def kept() -> dict[str, list[Outcome]]:
    files = {
        path.stem.removeprefix("results-"): json.loads(path.read_text(encoding="utf-8"))
        for path in HERE.glob("results-*.json")
    }
    oldest_first = sorted(files, key=lambda version: [int(n) for n in version.split(".")])
    return {version: [Outcome(**o) for o in files[version]] for version in oldest_first}


def write(outcomes: Sequence[Outcome]) -> None:
    version = ".".join(TORCH.split(".")[:2])
    new = {(o.ranks, o.side, o.test): replace(o, why=first_line(o.why)) for o in outcomes}
    old = {(o.ranks, o.side, o.test): o for o in kept().get(version, [])}
    told = [asdict(o) for o in (old | new).values()]
    path = HERE / f"results-{version}.json"
    path.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    (HERE / "RESULTS.md").write_text(page(), encoding="utf-8")


def quickest(count: int) -> list[str]:
    """Tests that passed with gradwire on two ranks with this PyTorch, and took the least time."""
    results, here = kept(), set(names())
    version = ".".join(TORCH.split(".")[:2])
    outcomes = results.get(version) or results[next(reversed(results))]
    wanted = ("gradwire", 2, "passed")
    passed = [o for o in outcomes if (o.side, o.ranks, o.came) == wanted and o.test in here]
    return [o.test for o in sorted(passed, key=lambda o: o.seconds)[:count]]


def page() -> str:
    lines = [
        "# PyTorch's own tests of DDP",
        "",
        "Written by `python tests/parity/run.py`: the tests about data parallelism in",
        "`torch.testing._internal.distributed.distributed_test`, on Gloo, with the CPU in the",
        "place of accelerators; first with PyTorch's class, then with gradwire's installed by",
        "`gradwire.compat`. Each version of PyTorch has a suite of its own.",
    ]
    parts = [section(version, outcomes) for version, outcomes in reversed(kept().items())]
    return "\n".join(lines) + "\n" + "".join(parts)


def section(version: str, outcomes: Sequence[Outcome]) -> str:
    cells = {(o.test, (o.side, o.ranks)): o for o in outcomes}
    ranks = sorted({o.ranks for o in outcomes})
    columns = [(side, count) for side in SIDES for count in ranks]
    tests = list(dict.fromkeys(o.test for o in outcomes))
    ran = [t for t in tests if any(cells[t, column].came == "passed" for column in columns)]
    lines = [
        "",
        f"## PyTorch {version}",
        "",
        f"| test | {' | '.join(f'{side}, {count} ranks' for side, count in columns)} | |",
        f"|---{'|---' * len(columns)}|---|",
    ]
    for test in ran:
        came = " | ".join(cells[test, column].came for column in columns)
        lines.append(f"| {test} | {came} | {PRIVATE.get(test, '')} |")
    counts = ", ".join(
        f"{side} on {count} ranks {sum(cells[t, (side, count)].came == 'passed' for t in tests)}"
        for side, count in columns
    )
    lines += ["", f"Passed: {counts}.", "", f"Not run here with PyTorch {version}:", ""]
    lines += ["| test | why |", "|---|---|"]
    for test in tests:
        if test not in ran:
            lines.append(f"| {test} | {first_line(cells[test, columns[0]].why)} |")
    return "\n".join(lines) + "\n"


def first_line(text: str) -> str:
    """The line that says why, without what cannot stand in a table."""
    line = text.split("\n", 1)[0].rpartition("first): ")[2]
    return re.sub(r"\x1b\[\d+m|\|", "", line)[:100]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--tests", nargs="*", default=[], help="only these")
    parser.add_argument("--ranks", nargs="*", type=int, default=[2, 3])
    parser.add_argument("--sides", nargs="*", choices=SIDES, default=SIDES)
    parser.add_argument("--quick", type=int, default=0, help="only so many, the quickest")
    parser.add_argument("--write", action="store_true", help="write results down, also of a part")
    options = parser.parse_args()
    # the suite reads these when it is imported, here too
    os.environ |= {"BACKEND": "gloo", "INIT_METHOD": "file:///unused", "TEMP_DIR": "/unused"}
    os.environ.setdefault("WORLD_SIZE", "2")
    tests = quickest(options.quick) if options.quick else options.tests
    outcomes = run_all(tests, options.sides, options.ranks)
    if options.write or (not tests and set(options.sides) == set(SIDES)):
        write(outcomes)
    bad = unexplained(outcomes)
    if set(options.sides) == {"gradwire"}:
        bad = [f"{o.test}: {o.came}" for o in outcomes if o.came in ("failed", "hung")]
    print("\n".join(["", *bad, f"{len(outcomes)} runs, {len(bad)} failures"]))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
