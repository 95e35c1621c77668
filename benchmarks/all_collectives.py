"""Every collective at every size on shm beside Gloo, with up to 16 ranks, free and pinned."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from benchmarks.alternate import OURS, alternate, repeated
from benchmarks.benchmark import Benchmark, size_text
from benchmarks.collectives import GLOO, OPERATIONS
from benchmarks.launch import launch
from benchmarks.options import Options
from benchmarks.progress import say
from benchmarks.results import CaseResult, Measure
from benchmarks.stats import scaled
from gradwire import shm

__all__ = ["BENCHMARK", "Case", "slower"]

INSIDE = "in the segment"
INSIDE_FROM = 64 << 10  # bytes; shorter data travels beside the header wherever it lies
SAMPLE_BYTES, MOST_REPEATS = 8 << 20, 30
SIZES = (4, 4 << 10, 64 << 10, 1 << 20, 4 << 20, 25 << 20, 100 << 20)


def _reduce(group: ProcessGroup, whole: Tensor, part: Tensor, other: Tensor) -> None:
    dist.reduce(whole, group=group, group_dst=0)


def _gather(group: ProcessGroup, whole: Tensor, part: Tensor, other: Tensor) -> None:
    pieces = list(whole.chunk(group.size())) if group.rank() == 0 else None
    dist.gather(part, pieces, group=group, group_dst=0)


def _scatter(group: ProcessGroup, whole: Tensor, part: Tensor, other: Tensor) -> None:
    pieces = list(whole.chunk(group.size())) if group.rank() == 0 else None
    dist.scatter(part, pieces, group=group, group_src=0)


ALL = {**OPERATIONS, "reduce": _reduce, "gather": _gather, "scatter": _scatter}


@dataclass(frozen=True)
class Case:
    """An operation at all sizes, between so many ranks; pinned to a core each or not."""

    ranks: int
    pinned: bool
    op: str

    @property
    def name(self) -> str:
        """Name of the case in tables."""
        return f"{self.op}, {self.ranks} ranks{', pinned' if self.pinned else ''}"


CASES = [
    Case(ranks, pinned, op)
    for ranks in (2, 4, 8, 16)
    for pinned in (False, True)
    for op in (*ALL, "barrier")
]


def measure(cases: Sequence[Case], options: Options) -> list[CaseResult]:
    """Each case's times; all cases with as many ranks, pinned or not, in one launch."""
    launches = dict.fromkeys((case.ranks, case.pinned) for case in cases)
    results = []
    for ranks, pinned in launches:
        alike = [case for case in cases if (case.ranks, case.pinned) == (ranks, pinned)]
        results += launch(_measure, alike, options.rounds, world_size=ranks, backend="gloo")
    return results


def _measure(cases: Sequence[Case], rounds: int) -> list[CaseResult]:
    if cases[0].pinned:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[dist.get_rank() % len(cores)]})
        dist.barrier()  # groups are formed when all ranks are pinned, as under a launcher
    groups = {OURS: dist.new_group(backend="shm"), GLOO: dist.new_group(backend="gloo")}
    results = []
    for case in cases:
        say(case.name)
        sizes = SIZES if case.op != "barrier" else SIZES[:1]
        measures = [m for nbytes in sizes for m in _measure_size(case.op, nbytes, rounds, groups)]
        results.append(CaseResult(case.name, "At most Gloo's time.", rounds, measures))
    return results


def _measure_size(
    op: str, nbytes: int, rounds: int, groups: dict[str, ProcessGroup]
) -> list[Measure]:
    world = groups[OURS].size()
    count = max(1, nbytes // 4 // world) * world
    repeats = max(1, min(MOST_REPEATS, SAMPLE_BYTES // nbytes))
    contenders = {OURS: groups[OURS], GLOO: groups[GLOO]}
    if nbytes >= INSIDE_FROM:
        contenders[INSIDE] = groups[OURS]
    steps: dict[str, Callable[[], None]] = {}
    for name, group in contenders.items():
        tensors = [_zeros(n, group, inside=name is INSIDE) for n in (count, count // world, count)]
        call = partial(dist.barrier, group)
        if op != "barrier":
            call = partial(ALL[op], group, *tensors)
        steps[name] = repeated(call, repeats)
    micro = scaled(alternate(steps, rounds, warmup=2), 1e6 / repeats)
    text = size_text(nbytes)
    measures = [Measure.of(text, "µs", {OURS: micro[OURS], GLOO: micro[GLOO]})]
    if INSIDE in micro:
        inside = {OURS: micro[INSIDE], GLOO: micro[GLOO]}
        measures.append(Measure.of(f"{text} {INSIDE}", "µs", inside))
    return measures


def _zeros(count: int, group: ProcessGroup, *, inside: bool) -> Tensor:
    return shm.empty(count, group=group).zero_() if inside else torch.zeros(count)


def slower(cases: Sequence[CaseResult]) -> str:
    """Return a sentence that lists the operations that were slower on shm than on Gloo."""
    found = [
        f"{case.name}, {measure.name}: {ratio.value:.2f} ({ratio.low:.2f} to {ratio.high:.2f})"
        for case in cases
        for measure in case.measures
        for ratio in measure.ratios.values()
        if ratio.low > 1
    ]
    if not found:
        return "No operation took longer on shm than on Gloo beyond the interval."
    return "Longer on shm than on Gloo, beyond the interval: " + "; ".join(found) + "."


BENCHMARK = Benchmark(
    "collectives_all",
    "Every collective at every size, on shm and on Gloo",
    CASES,
    measure,
    rounds=8,
    verdict=slower,
)
