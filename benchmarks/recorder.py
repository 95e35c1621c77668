"""Cost of the recorder: a training step and small collectives, with and without it.

And with a timeline, which keeps what it records. The ratio to that is the inverse of its cost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import ddp
from benchmarks.alternate import OURS, alternate
from benchmarks.benchmark import Benchmark
from benchmarks.launch import launch
from benchmarks.options import Options
from benchmarks.progress import say
from benchmarks.results import CaseResult, Measure
from benchmarks.stats import scaled
from benchmarks.training import Training
from gradwire import collectives
from gradwire.ddp import DistributedDataParallel
from gradwire.recorder import ring

__all__ = ["BENCHMARK", "Case", "measure"]

OFF = "recorder off"
TIMELINE = "with a timeline"
CALLS = 200
CALL = "small collective"


@dataclass(frozen=True)
class Case:
    """A training step of one of ddp's networks, or a small call."""

    name: str
    expected: str


CASES = [
    *(
        Case(case.name, "3 µs a bucket and collective: a ratio of at most 1.01")
        for case in ddp.CASES[:3]
    ),
    Case("all_reduce, 40 bytes", "3 to 6 µs a call, of 40"),
    Case("collectives.all_reduce, 40 bytes", "3 to 8 µs a call, of 80"),
]


def measure(cases: Sequence[Case], options: Options) -> list[CaseResult]:
    """Each case, in one launch."""
    times = launch(
        _time, cases, options.rounds, world_size=options.world_size, backend=options.backend
    )
    return [
        CaseResult(case.name, case.expected, options.rounds, [found])
        for case, found in zip(cases, times, strict=True)
    ]


def _time(cases: Sequence[Case], rounds: int) -> list[Measure]:
    return [_time_case(case, rounds) for case in cases]


def _time_case(case: Case, rounds: int) -> Measure:
    say(case.name)
    training = {each.name: each for each in ddp.CASES}.get(case.name)
    if training is not None:
        step = Training(training).wrap(DistributedDataParallel).step
        taken = alternate(_contenders(step, 2), rounds, warmup=5)
        return Measure.of("step", "ms", scaled(taken, 1e3 / 2))
    x = torch.ones(10)
    call: Callable[[], object] = lambda: dist.all_reduce(x)  # noqa: E731
    if case.name.startswith("collectives"):
        call = lambda: collectives.all_reduce(x)  # noqa: E731
    taken = alternate(_contenders(call, CALLS), rounds, warmup=5)
    return Measure.of("call", "µs", scaled(taken, 1e6 / CALLS))


def _contenders(call: Callable[[], object], times: int) -> dict[str, Callable[[], None]]:
    records: list[Any] = []

    def repeat(on: bool, listener: Callable[[Any], None] | None = None) -> Callable[[], None]:
        def run() -> None:
            ring.on, ring.listener = on, listener
            for _ in range(times):
                call()
            ring.on, ring.listener = True, None
            records.clear()

        return run

    return {OURS: repeat(True), OFF: repeat(False), TIMELINE: repeat(True, records.append)}


BENCHMARK = Benchmark(
    "recorder",
    "The recorder: a step and small collectives with and without it",
    CASES,
    measure,
    rounds=60,
)
