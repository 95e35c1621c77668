"""Transfers and sums on one GPU, beside bare copies of as many bytes: what the hardware allows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import click
import torch

from benchmarks.alternate import OURS
from benchmarks.benchmark import Benchmark
from benchmarks.devices import Case, Steps
from benchmarks.devices import measure as measure_here
from benchmarks.options import Options
from benchmarks.results import CaseResult
from gradwire.devices import gather, reduce_add, scatter

__all__ = ["BENCHMARK", "measure"]

GPU = "cuda:0"
COPY = "bare copy"


def _to_the_end(call: Callable[[], object]) -> Callable[[], None]:
    """The call, and then the wait for what it started."""

    def step() -> None:
        call()
        torch.cuda.synchronize(GPU)

    return step


def _scattering(mebibytes: int) -> Steps:
    source = torch.randn(mebibytes << 18).pin_memory()
    target = torch.empty(source.shape, device=GPU)
    return {
        OURS: _to_the_end(partial(scatter, source, [GPU])),
        COPY: _to_the_end(partial(target.copy_, source, non_blocking=True)),
    }


def _gathering(mebibytes: int) -> Steps:
    parts = torch.randn(mebibytes << 18, device=GPU).chunk(4)
    source = torch.cat(parts)
    target = torch.empty(source.shape, pin_memory=True)
    return {
        OURS: _to_the_end(partial(gather, parts, destination="cpu")),
        COPY: _to_the_end(partial(target.copy_, source, non_blocking=True)),
    }


def _adding(k: int, mebibytes: int) -> Steps:
    inputs = [torch.randn(mebibytes << 18, device=GPU) for _ in range(k)]
    # k read and one written: (k+1)/2 copies, for an odd k.
    sources = torch.randn((k + 1) // 2, mebibytes << 18, device=GPU)
    targets = torch.empty_like(sources)
    return {
        OURS: _to_the_end(partial(reduce_add, inputs)),
        COPY: _to_the_end(partial(targets.copy_, sources)),
    }


CASES = [
    Case("scatter, 1 GiB from the host", partial(_scattering, 1024), "At most 1.18."),
    Case("gather, 1 GiB to the host", partial(_gathering, 1024), "At most 1.18."),
    Case("reduce_add, 3 x 256 MiB", partial(_adding, 3, 256), "At most 1.43."),
    Case("reduce_add, 7 x 256 MiB", partial(_adding, 7, 256), "At most 1.43."),
]


def measure(cases: Sequence[Case], options: Options) -> list[CaseResult]:
    """Each case's times, taken in one process.

    Raises:
        click.ClickException: There is no GPU here.
    """
    if not torch.cuda.is_available():
        raise click.ClickException("there is no CUDA device here")
    return measure_here(cases, options)


BENCHMARK = Benchmark(
    "devices_gpu",
    "transfers and sums on one GPU, beside bare copies of as many bytes",
    CASES,
    measure,
    rounds=30,
    one_process=True,
)
