"""Overhead of a differentiable collective: its time in Python before and after the transfer.

The ranks' backend is torch's fake one, which moves nothing and returns at once. On a real backend
the waits for other ranks vary by more than what is looked for here.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.alternate import OURS, alternate, repeated
from benchmarks.benchmark import Benchmark
from benchmarks.differentiable import OPS, RAW, TORCH, Op
from benchmarks.options import Options
from benchmarks.progress import say
from benchmarks.results import CaseResult, Measure
from benchmarks.stats import ratio, scaled, spread

__all__ = ["BENCHMARK", "Case", "measure"]

ROWS = 16
REPEATS = 200
WORLD_SIZE = 2
PREDICTION = "Some 10 µs over the raw call: a graph node, and 20 to 40 steps in Python."


@dataclass(frozen=True)
class Case:
    """An operation, as rank 0 of two calls it."""

    op: Op

    @property
    def name(self) -> str:
        """Name of the case in tables."""
        return self.op.name


CASES = [Case(op) for op in OPS]


def measure(cases: Sequence[Case], options: Options) -> list[CaseResult]:
    """Each operation's forward, beside torch's and the bare call."""
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD_SIZE)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch's functions are deprecated
            return [_measure_case(case, options.rounds) for case in cases]
    finally:
        dist.destroy_process_group()


def _measure_case(case: Case, rounds: int) -> CaseResult:
    say(case.name)
    group = dist.distributed_c10d._get_default_group()
    x = torch.randn(ROWS, 64, requires_grad=True)
    calls = {OURS: case.op.ours, TORCH: case.op.torch, RAW: case.op.raw}
    steps = {name: repeated(partial(call, x, group), REPEATS) for name, call in calls.items()}
    samples = scaled(alternate(steps, rounds), 1e6 / REPEATS)
    times = {name: spread(taken) for name, taken in samples.items()}
    for name in (OURS, TORCH):
        above = [a - b for a, b in zip(samples[name], samples[RAW], strict=True)]
        times[f"{name}, above raw"] = spread(above)
    ratios = {peer: ratio(samples[OURS], samples[peer]) for peer in (TORCH, RAW)}
    return CaseResult(case.name, PREDICTION, rounds, [Measure("forward", "µs", times, ratios)])


BENCHMARK = Benchmark(
    "overhead",
    "Steps in Python of differentiable collectives: a backend that moves nothing",
    CASES,
    measure,
    rounds=31,
    one_process=True,
)
