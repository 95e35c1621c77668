"""The ten most important ratios, measured again in five minutes beside those that are committed.

A ratio has become worse if its interval lies above the committed one by more than `TOLERANCE`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks import broadcast, collectives, ddp
from benchmarks.benchmark import Benchmark
from benchmarks.options import Options
from benchmarks.results import CaseResult, Result
from benchmarks.stats import Estimate
from benchmarks.tables import RESULTS

__all__ = ["CHECKS", "Check", "Comparison", "compared", "guard"]

TOLERANCE = 1.05
"""Factor by which a busy host changes a ratio that was measured in one launch."""


@dataclass(frozen=True)
class Check:
    """Cases of one benchmark on one backend, and the file of their committed results."""

    benchmark: Benchmark[Any]
    backend: str
    committed: str
    names: Sequence[str]
    rounds: int


MANY = "1000 x linear 8, find_unused_parameters"
STEPS = ("200 x linear 64", "MLP 6 x 1024", "transformer 6 x 256")
CHECKS = [
    Check(ddp.BENCHMARK, "gloo", "ddp", [*STEPS, MANY], 12),
    Check(ddp.BENCHMARK, "shm", "ddp_shm", STEPS, 12),
    Check(broadcast.BENCHMARK, "shm", "broadcast_shm", ["1000 x 1 KB"], 8),
    Check(
        collectives.BENCHMARK, "gloo", "collectives", ["all_reduce, 4 KiB", "all_reduce, 25 MiB"], 8
    ),
]


@dataclass(frozen=True)
class Comparison:
    """The first ratio of a case, now and as it was committed."""

    name: str
    now: Estimate
    before: Estimate

    @property
    def worse(self) -> bool:
        """True if the ratio has grown beyond its interval."""
        return self.now.low > TOLERANCE * self.before.high

    def __str__(self) -> str:
        texts = (f"{e.value:.2f} ({e.low:.2f} to {e.high:.2f})" for e in (self.now, self.before))
        return f"{'WORSE' if self.worse else 'ok':5}  {self.name}: {', committed '.join(texts)}"


def guard(checks: Sequence[Check] = CHECKS) -> Iterator[Comparison]:
    """Measure, and yield each case's ratio beside the committed one."""
    for check in checks:
        cases = [case for case in check.benchmark.cases if case.name in check.names]
        if check.benchmark is ddp.BENCHMARK:
            cases = [replace(case, memory=False) for case in cases]
        options = Options(rounds=check.rounds, backend=check.backend)
        before = {c.name: c for c in Result.read(RESULTS / f"{check.committed}.json").cases}
        for case in check.benchmark.measure(cases, options):
            yield compared(f"{check.committed}: {case.name}", case, before[case.name])


def compared(name: str, now: CaseResult, before: CaseResult) -> Comparison:
    """Return the comparison of two results by their first measure and its first peer."""
    peer = next(iter(before.measures[0].ratios))
    estimates = (result.measures[0].ratios[peer] for result in (now, before))
    return Comparison(f"{name}, {before.measures[0].name}, of {peer}", *estimates)
