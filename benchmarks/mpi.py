"""all_reduce on shm and under MPIs, one per environment, alternating.

The environment variable MPI_ENVIRONMENTS names virtual environments with mpi4py and an MPI:
"Open MPI=PATH:Intel MPI=PATH".
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.alternate import OURS, alternate, order
from benchmarks.benchmark import Benchmark
from benchmarks.launch import launch
from benchmarks.options import Options
from benchmarks.progress import say
from benchmarks.results import CaseResult, Measure
from benchmarks.stats import scaled
from gradwire import shm

__all__ = ["BENCHMARK", "Case", "measure"]

LAUNCHES = 4
WARMUP = 3
SECONDS = 120
SETTINGS = {
    # what a test machine needs: root, fewer cores than ranks, no network
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "I_MPI_FABRICS": "shm",
}
PREDICTION = (
    "The MPIs copy into shared memory and out of it, and read from one array and write to another. "
    "gradwire reduces where the tensor lies, from 1 MB on with as few passes as there can be; for "
    "short messages, Python's steps cost more than the rest, torch.distributed's more than half of "
    "them."
)

Samples = dict[int, list[float]]


@dataclass(frozen=True)
class Case:
    """An all_reduce of so many bytes of float32."""

    name: str
    nbytes: int


CASES = [
    Case("all_reduce, 4 KiB", 4 << 10),
    Case("all_reduce, 64 KiB", 64 << 10),
    Case("all_reduce, 1 MiB", 1 << 20),
    Case("all_reduce, 25 MiB", 25 << 20),
    Case("all_reduce, 100 MiB", 100 << 20),
]


def measure(cases: Sequence[Case], options: Options) -> list[CaseResult]:
    """Measure each case; contenders are launched several times, alternating."""
    sizes = [case.nbytes for case in cases]
    contenders: dict[str, Callable[[], dict[str, Samples]]] = {OURS: partial(_ours, sizes, options)}
    for entry in filter(None, os.environ.get("MPI_ENVIRONMENTS", "").split(":")):
        name, _, path = entry.partition("=")
        contenders[name] = partial(_mpi, name, Path(path), sizes, options)
    taken: dict[str, Samples] = {name: {size: [] for size in sizes} for name in contenders}
    for number in range(LAUNCHES):
        for name in order(list(contenders), number):
            say(f"{name}, launch {number + 1} of {LAUNCHES}")
            for kind, samples in contenders[name]().items():
                for size, seconds in samples.items():
                    taken[kind][size] += seconds
    return [_result(case, taken, options) for case in cases]


def _result(case: Case, taken: dict[str, Samples], options: Options) -> CaseResult:
    seconds = {name: samples[case.nbytes] for name, samples in taken.items()}
    measures = [Measure.of("time", "µs", scaled(seconds, 1e6))]
    return CaseResult(case.name, PREDICTION, LAUNCHES * options.rounds, measures)


def _ours(sizes: Sequence[int], options: Options) -> dict[str, Samples]:
    return launch(_time, sizes, options.rounds, world_size=options.world_size, backend="shm")


def _time(sizes: Sequence[int], rounds: int) -> dict[str, Samples]:
    taken: Samples = {}
    for size in sizes:
        tensor = shm.empty(size // 4, dtype=torch.float32).zero_()
        steps = {OURS: partial(dist.all_reduce, tensor)}
        taken[size] = alternate(steps, rounds, warmup=WARMUP)[OURS]
    return {OURS: taken}


def _mpi(
    name: str, environment: Path, sizes: Sequence[int], options: Options
) -> dict[str, Samples]:
    script = Path(__file__).with_name("mpi_rank.py")
    done = subprocess.run(
        [
            *(environment / "bin" / "mpiexec", "-n", str(options.world_size)),
            *(environment / "bin" / "python", script, str(options.rounds)),
            *(str(size) for size in sizes),
        ],
        env={**os.environ, **SETTINGS, "I_MPI_ROOT": str(environment)},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=True,
    )
    found: dict[str, list[float]] = json.loads(done.stdout.splitlines()[-1])
    return {name: {int(size): seconds for size, seconds in found.items()}}


BENCHMARK = Benchmark(
    "mpi", "all_reduce on shm, in the segment, and under MPIs of this host", CASES, measure, 25
)
