"""A whole training step, with the optimizer's: sharded, and the plain optimizer beside others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from benchmarks.alternate import OURS, alternate
from benchmarks.benchmark import Benchmark
from benchmarks.launch import launch
from benchmarks.memory import peak_of
from benchmarks.options import Options
from benchmarks.progress import say
from benchmarks.results import CaseResult, Measure
from benchmarks.stats import scaled
from gradwire.ddp import DistributedDataParallel
from gradwire.optim import ShardedOptimizer

__all__ = ["BENCHMARK"]

PLAIN = "gradwire's DDP and the plain optimizer"
ZERO = "torch's DDP and ZeroRedundancyOptimizer"
FSDP = "fully_shard without resharding"


@dataclass(frozen=True)
class Case:
    """A network of square layers, and an optimizer."""

    name: str
    layers: int
    width: int
    optimizer: type[torch.optim.Optimizer]
    options: dict[str, Any]
    reduce_scatter: bool
    expected: str
    # measure memory instead of time
    memory: bool = False

    def model(self) -> nn.Module:
        """Linear layers without biases: Muon takes matrices."""
        torch.manual_seed(0)
        return nn.Sequential(
            *(nn.Linear(self.width, self.width, bias=False) for _ in range(self.layers))
        )

    def parts(self, name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Return a contender's wrapped network and its optimizer."""
        net, kind, options = self.model(), self.optimizer, self.options
        if name == OURS:
            wrapped: nn.Module = DistributedDataParallel(net, gradient_as_bucket_view=True)
            sharded: Any = ShardedOptimizer  # of the wrapper's type
            rs = self.reduce_scatter
            return wrapped, sharded(wrapped, kind, reduce_scatter=rs, **options)
        if name == PLAIN:
            wrapped = DistributedDataParallel(net, gradient_as_bucket_view=True)
        elif name == FSDP:
            mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
            fully_shard(net, mesh=mesh, reshard_after_forward=False)
            wrapped = net
        else:
            # the import warns that it uses torch.jit
            from torch.distributed.optim import ZeroRedundancyOptimizer

            wrapped = TorchDDP(net, gradient_as_bucket_view=True)
            return wrapped, ZeroRedundancyOptimizer(wrapped.parameters(), kind, **options)
        return wrapped, kind(wrapped.parameters(), **options)


ADAMW: tuple[type[torch.optim.Optimizer], dict[str, Any]]
ADAMW = torch.optim.AdamW, {"lr": 1e-4, "fused": True}
MUON = torch.optim.Muon, {"lr": 1e-3}
MODES = (("", False), (", reduce_scatter", True))
CASES = [
    Case(f"{name}{mode}", layers, width, kind, given, rs, expected)
    for name, layers, width, (kind, given), expected in (
        ("AdamW, 25 million", 6, 2048, ADAMW, "at most 1"),
        ("AdamW, 100 million", 24, 2048, ADAMW, "at most 1"),
        ("Muon, 6 million", 24, 512, MUON, "at most 0.6 with 4 ranks"),
    )
    for mode, rs in MODES
]
CASES += [
    Case(
        f"AdamW, 25 million{mode}, memory",
        6,
        2048,
        *ADAMW,
        rs,
        "state 1 / ranks, peak at most 1",
        memory=True,
    )
    for mode, rs in MODES
]
STEPS = 4
"""Steps of a measurement of memory."""
LAUNCHES = 3
"""Maximum number of measurements of memory: it varies by less than 1 %."""
ROWS = 16
"""Rows of a batch: with few, the optimizer's step is a large part of the whole."""


def measure(cases: Sequence[Case], options: Options) -> list[CaseResult]:
    """Each case's steps, taken in one launch."""
    results = []
    for case in cases:
        say(case.name)
        backend = options.backend
        if case.memory:
            measures = _memory(case, options)
        else:
            arguments = case, options.rounds, backend
            ms = launch(_time, *arguments, world_size=options.world_size, backend=backend)
            measures = [Measure.of("step", "ms", ms)]
        results.append(CaseResult(case.name, case.expected, options.rounds, measures))
    return results


def _time(case: Case, rounds: int, backend: str) -> dict[str, list[float]]:
    names = [OURS, PLAIN]
    if backend == "gloo" and case.layers * case.width**2 < 50e6:  # memory holds two of the large
        names += [ZERO] if case.optimizer is torch.optim.AdamW else []
        names += [FSDP] if case.optimizer is torch.optim.AdamW else []
    torch.manual_seed(dist.get_rank())
    batch = torch.randn(ROWS, case.width)
    steps: dict[str, Callable[[], None]] = {
        name: partial(_step, *case.parts(name), batch) for name in names
    }
    return scaled(alternate(steps, rounds), 1e3)


def _memory(case: Case, options: Options) -> list[Measure]:
    """Return the optimizer's state and the peak, of processes for each contender and round."""
    states: dict[str, list[float]] = {name: [] for name in (OURS, PLAIN)}
    peaks: dict[str, list[float]] = {name: [] for name in states}
    for _ in range(min(options.rounds, LAUNCHES)):
        for name in states:
            ranks, backend = options.world_size, options.backend
            state, peak = launch(_megabytes, case, name, world_size=ranks, backend=backend)
            states[name].append(state)
            peaks[name].append(peak)
    return [Measure.of("state", "MB", states), Measure.of("peak memory", "MB", peaks)]


def _megabytes(case: Case, name: str) -> tuple[float, float]:
    state: Mapping[Any, Mapping[str, Any]] = {}

    def train(case: Case) -> None:
        nonlocal state
        net, optimizer = case.parts(name)
        batch = torch.randn(ROWS, case.width)
        for _ in range(STEPS):
            _step(net, optimizer, batch)
        own = isinstance(optimizer, ShardedOptimizer)
        state = optimizer.own_state() if own else optimizer.state  # type: ignore[attr-defined]

    train(replace(case, layers=1, width=8))  # to import and start what every training needs
    peak = peak_of(partial(train, case))
    return sum(t.nbytes for each in state.values() for t in each.values()) / 1e6, peak


def _step(net: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
    net(batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


BENCHMARK = Benchmark(
    "optim",
    "A training step with the optimizer's, sharded or not, and its memory",
    CASES,
    measure,
    rounds=20,
)
