"""all_reduce over two hosts with MPI or Gloo between them: names of hosts, on this machine.

The environment variable MPI_ENVIRONMENTS names virtual environments with torch, mpi4py and an MPI:
"Open MPI=PATH:MPICH=PATH:Intel MPI=PATH". Each is launched once, by its mpiexec; in a launch, the
engines take turns.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.benchmark import Benchmark
from benchmarks.mpi import SETTINGS
from benchmarks.options import Options
from benchmarks.progress import say
from benchmarks.results import CaseResult, Measure
from benchmarks.stats import scaled

__all__ = ["BENCHMARK", "Case", "measure"]

SECONDS = 200
MPIS = ("Open MPI", "MPICH", "Intel MPI")
# ranks bound to a core each would keep the thread that tests for messages from running
ANYWHERE = {"I_MPI_PIN": "0", "PRTE_MCA_hwloc_default_binding_policy": "none"}
PREDICTION = (
    "Between hosts that are one machine, MPI copies through shared memory, which Gloo's sockets do "
    "with more copies; short messages wait for the thread that tests for them."
)


@dataclass(frozen=True)
class Case:
    """An all_reduce of so many bytes of float32, with an MPI."""

    name: str
    nbytes: int
    mpi: str


CASES = [
    Case(f"{text}, {mpi}", nbytes, mpi)
    for text, nbytes in (("8 bytes", 8), ("1 MB", 10**6), ("26 MB", 26 * 10**6))
    for mpi in MPIS
]


def measure(cases: Sequence[Case], options: Options) -> list[CaseResult]:
    """The times of the cases whose MPI there is."""
    given = os.environ.get("MPI_ENVIRONMENTS", "").split(":")
    paths = dict(entry.split("=", 1) for entry in given if "=" in entry)
    taken = {}
    for mpi in {case.mpi: None for case in cases if case.mpi in paths}:
        say(mpi)
        sizes = [case.nbytes for case in cases if case.mpi == mpi]
        for nbytes, seconds in _launched(Path(paths[mpi]), sizes, options).items():
            taken[mpi, nbytes] = scaled(seconds, 1e3)
    return [
        CaseResult(
            case.name,
            PREDICTION,
            options.rounds,
            [Measure.of("all_reduce", "ms", taken[case.mpi, case.nbytes])],
        )
        for case in cases
        if case.mpi in paths
    ]


def _launched(
    environment: Path, sizes: Sequence[int], options: Options
) -> dict[int, dict[str, list[float]]]:
    root = Path(__file__).parents[1]
    search = [str(root), str(root / "src"), os.environ.get("PYTHONPATH", "")]
    variables = {**os.environ, **SETTINGS, **ANYWHERE, "PYTHONPATH": ":".join(search)}
    done = subprocess.run(
        [
            *(environment / "bin" / "mpiexec", "-n", str(options.world_size)),
            *(environment / "bin" / "python", "-m", "benchmarks.engines_rank"),
            *map(str, (options.rounds, *sizes)),
        ],
        env=variables,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=True,
    )
    found: dict[str, dict[str, list[float]]] = json.loads(done.stdout.splitlines()[-1])
    return {int(nbytes): seconds for nbytes, seconds in found.items()}


BENCHMARK = Benchmark(
    "engines", "all_reduce over two hosts, with MPI or Gloo between them", CASES, measure, 40
)
