"""A training step on one GPU under gradwire's wrapper and PyTorch's, and what hooks take per byte.

One rank communicates over NCCL: what is compared is the work around the collectives. "host" is the
time until a step's calls have returned; where it is the longer one, the GPU waits for Python.
`.ci/gpu` runs the cases in the order of their value, and small ones on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

import click
import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks import hooks, models
from benchmarks.alternate import OURS, alternate
from benchmarks.benchmark import Benchmark
from benchmarks.options import Options
from benchmarks.progress import say
from benchmarks.results import CaseResult, Measure
from benchmarks.stats import ratio, scaled, spread
from benchmarks.training import TORCH, Case, Training, wrappers
from gradwire.testing import FakeBucket

__all__ = ["BENCHMARK", "CASES", "SMALL", "HookCase", "measure_on"]

LAUNCHES = ("LaunchKernel", "Memcpy", "Memset")
WAITS = ("StreamSynchronize", "DeviceSynchronize", "EventSynchronize")
BUCKET_BYTES = 64 << 20
HOST_STEPS = 10


@dataclass(frozen=True)
class HookCase:
    """A hook on one bucket: encoding and decoding, with a backend that moves nothing."""

    hook: hooks.Case
    nbytes: int = BUCKET_BYTES

    @property
    def name(self) -> str:
        """Name of the case in tables."""
        return f"hook {self.hook.name}, {self.nbytes >> 20} MiB"


def _tokens(*shape: int, vocabulary: int = 50257) -> Tensor:
    return torch.randint(vocabulary, shape)


AIM = "step at most 1.02"
CASES: list[Case | HookCase] = [
    Case("200 x linear 64, batch 8", models.linear_layers, (8, 64), "step at most 1.10"),
    Case("GPT-2 small, 1 x 128", models.Gpt, (1, 128), AIM, draw=_tokens),
    Case("ResNet-50, batch 4", models.resnet, (4, 3, 224, 224), AIM),
    Case("GPT-2 small, 8 x 512", models.Gpt, (8, 512), AIM, draw=_tokens),
    Case("ResNet-50, batch 64", models.resnet, (64, 3, 224, 224), AIM),
    *(HookCase(case) for case in hooks.CASES),
    Case("200 x linear 64, batch 4096", models.linear_layers, (4096, 64), "step at most 1.10"),
    Case("MLP 6 x 1024, batch 128", models.mlp, (128, 1024), AIM),
]
SMALL: list[Case | HookCase] = [
    Case("20 x linear 8", partial(models.linear_layers, 20, 8), (4, 8), ""),
    Case(
        "tiny GPT",
        partial(models.Gpt, 1, 16, 50, 8),
        (2, 8),
        "",
        draw=partial(_tokens, vocabulary=50),
    ),
    Case("tiny ResNet", partial(models.resnet, (1, 1), 4, 10), (2, 3, 32, 32), ""),
    *(HookCase(case, 1 << 20) for case in hooks.CASES),
]
"""The same code in little time, to see that it works."""


def measure_on(device: str, case: Case | HookCase, rounds: int) -> CaseResult:
    """Return a case's figures on a device, for a single rank."""
    say(case.name)
    torch.set_float32_matmul_precision("high")  # as programs that care for speed have it
    if isinstance(case, HookCase):
        with _group("fake", 2):
            return CaseResult(case.name, case.hook.expected, rounds, _hook(device, case, rounds))
    with _group("gloo" if device == "cpu" else "nccl", 1):
        return CaseResult(case.name, case.expected, rounds, _step(device, case, rounds))


@contextmanager
def _group(backend: str, size: int) -> Iterator[None]:
    store: Any = FakeStore() if backend == "fake" else dist.HashStore()
    dist.init_process_group(backend, store=store, rank=0, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _finished(call: Callable[[], object], device: str) -> Callable[[], None]:
    """Return a function that calls and waits until the device has done what was queued."""

    def step() -> None:
        call()
        if device != "cpu":
            torch.cuda.synchronize()

    return step


def _step(device: str, case: Case, rounds: int) -> list[Measure]:
    made = wrappers("gloo")
    trainings = {n: Training(case, device).wrap(made[n]) for n in (OURS, TORCH)}
    steps = {name: _finished(t.step, device) for name, t in trainings.items()}
    seconds = alternate(steps, rounds)
    _check_same(trainings)
    host = {name: _host_seconds(t.step, steps[name]) for name, t in trainings.items()}
    counts = {name: _counts(steps[name], device) for name in steps}
    return [
        Measure.of("step", "ms", scaled(seconds, 1e3)),
        Measure.of("host", "ms", scaled(host, 1e3)),
        *(_counted(what, counts, i) for i, what in enumerate(("launches", "waits of the host"))),
        *([_memory(trainings, steps)] if device != "cpu" else []),
    ]


def _check_same(trainings: Mapping[str, Training]) -> None:
    for ours, theirs in zip(*(t.gradients() for t in trainings.values()), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-3)


def _host_seconds(call: Callable[[], object], finished: Callable[[], None]) -> list[float]:
    """Return the times until calls return, each made when the device is idle."""
    taken = []
    for _ in range(HOST_STEPS):
        finished()
        start = perf_counter()
        call()
        taken.append(perf_counter() - start)
    return taken


def _counts(call: Callable[[], None], device: str) -> tuple[int, int]:
    """Return how many kernels and copies are launched, and how often the host waits.

    On the CPU, operators take the place of kernels.
    """
    kinds = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device != "cpu" else [])
    with profile(activities=kinds) as profiled:
        call()
    found = {event.key: event.count for event in profiled.key_averages()}
    launched = LAUNCHES if device != "cpu" else ("aten::",)

    def total(parts: Sequence[str]) -> int:
        prefixes = ("cuda", "cu") if device != "cpu" else ("aten",)
        named = (k for k in found if k.startswith(prefixes) and any(p in k for p in parts))
        return sum(found[name] for name in named)

    return total(launched), total(WAITS)


def _counted(what: str, counts: Mapping[str, tuple[int, int]], place: int) -> Measure:
    samples = {name: [float(both[place])] for name, both in counts.items()}
    known = {TORCH: ratio(samples[OURS], samples[TORCH])} if samples[TORCH][0] else {}
    return Measure(what, "", {name: spread(taken) for name, taken in samples.items()}, known)


def _memory(trainings: Mapping[str, Training], steps: Mapping[str, Callable[[], None]]) -> Measure:
    """Return the peak within a step, above what all contenders keep."""
    peaks: dict[str, list[float]] = {}
    for name, training in trainings.items():
        for parameter in training.module.parameters():
            parameter.grad = None
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        steps[name]()
        peaks[name] = [(torch.cuda.max_memory_allocated() - before) / 1e6]
    return Measure.of("memory in a step", "MB", peaks)


def _hook(device: str, case: HookCase, rounds: int) -> list[Measure]:
    """Return the time per gigabyte beside that of copying the bucket once."""
    flat = torch.randn(case.nbytes // 4, device=device)
    other, hook = torch.empty_like(flat), case.hook.make()
    run = hook.run_hook if hasattr(hook, "run_hook") else partial(hook, dist.group.WORLD)
    bucket = FakeBucket(flat.view(-1, 256))

    def once() -> None:
        run(bucket).wait()

    calls = {OURS: _finished(once, device), "a copy": _finished(lambda: other.copy_(flat), device)}
    seconds = alternate(calls, rounds)
    return [Measure.of("hook", "ms per GB", scaled(seconds, 1e12 / case.nbytes))]


def measure(cases: Sequence[Case | HookCase], options: Options) -> list[CaseResult]:
    """Each case's figures, taken in one process.

    Raises:
        click.ClickException: There is no GPU here.
    """
    if not torch.cuda.is_available():
        raise click.ClickException("there is no CUDA device here")
    return [measure_on("cuda", case, options.rounds) for case in cases]


BENCHMARK = Benchmark(
    "gpu",
    "a training step on one GPU, one rank on NCCL, beside PyTorch's class; hooks per byte",
    CASES,
    measure,
    rounds=30,
    one_process=True,
)
