"""Steps on slow links: what `gradwire plan` says they take, what they take, and what auto takes.

Hosts are network namespaces, as for `links`. On each link the ranks first measure what
`gradwire plan --here` measures: forward, backward and update without communication, what hooks
compute with nothing sent, and collectives of sizes of their own. No step is among it. Each hook's
steps are timed, alternating. The prediction is the median of predictions made before, between and
after them, because a machine's speed varies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks import models
from benchmarks.alternate import OURS, alternate
from benchmarks.benchmark import Benchmark
from benchmarks.language import Language, corpus
from benchmarks.links import RATES
from benchmarks.options import Options
from benchmarks.progress import say
from benchmarks.results import CaseResult, Measure
from benchmarks.stats import Spread, ratio, scaled, spread
from gradwire import hooks
from gradwire.ddp import DistributedDataParallel
from gradwire.testing import run_ranks
from gradwire.testing.hosts import Hosts
from gradwire.tuning.candidates import PLAIN, candidate
from gradwire.tuning.plan.predict import predict_here, profile_here

__all__ = ["BENCHMARK", "Case", "measure"]

HOOKS = ["bf16", "int8", "int4", "low_rank", "top_k", "sign"]
PREPARED_STEPS = 3
SECONDS = 900.0


@dataclass(frozen=True)
class Network:
    """A module and this rank's batch."""

    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[], Tensor]


def _passages() -> Tensor:
    generator = torch.Generator().manual_seed(dist.get_rank())
    return corpus().batch(generator, 4, 32)


NETWORKS = (
    Network("transformer", lambda: Language(4, 192, 32), _passages),
    Network("MLP", partial(models.mlp, 4, 768), partial(torch.randn, 32, 768)),
)


@dataclass(frozen=True)
class Case:
    """A network on a link; rounds are the asked for divided by `slower`, without one to warm up.

    Such a link saves up credit while it rests: a step finds what its predecessor has left.
    """

    name: str
    network: Network
    rate: float | None
    slower: int = 1


CASES = [
    Case(f"{network.name}, {name}", network, rate, 3 if name == "10 Mbit/s" else 1)
    for network in NETWORKS
    for name, rate in RATES.items()
]


def measure(cases: Sequence[Case], options: Options) -> list[CaseResult]:
    """Each case's steps and what was predicted of them, in one launch.

    Raises:
        NotSupportedError: This system lets its user make no namespaces.
    """
    results = []
    with Hosts(options.hosts) as hosts:
        for case in cases:
            say(case.name)
            hosts.limit(None if case.rate is None else f"{case.rate:.0f}bit")
            rounds = max(2, options.rounds // case.slower)
            chosen, measures = run_ranks(
                _measure_case,
                sum(options.hosts),
                hosts=hosts,
                args=(case.name, rounds, 0 if case.slower > 1 else 1),
                timeout=SECONDS,
            )[0]
            results.append(CaseResult(case.name, f"auto took {chosen}.", rounds, measures))
    return results


def _nothing(names: Iterable[str]) -> dict[str, list[float]]:
    return {name: [] for name in names}


class _Training:
    """Steps of a network of its own, under one hook."""

    def __init__(self, network: Network, hook: Any) -> None:
        torch.manual_seed(0)
        self.module = DistributedDataParallel(network.make())
        if hook != PLAIN:
            self.module.register_comm_hook(None, hook)
        self.batch = network.batch()
        self.optimizer = _optimizer(self.module)

    def step(self) -> None:
        self.optimizer.zero_grad()
        _loss(self.module(self.batch)).backward()
        self.optimizer.step()


def _optimizer(module: nn.Module) -> torch.optim.Optimizer:
    # so small a rate leaves the values, and with them the time of a step, as they are
    return torch.optim.AdamW(module.parameters(), lr=1e-7, weight_decay=0.0, foreach=True)


def _loss(output: Tensor) -> Tensor:
    return output if output.dim() == 0 else output.square().mean()


class _WithLoss(nn.Module):
    """Module for `gradwire plan`, whose output is the loss."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, batch: Tensor) -> Tensor:
        return _loss(self.module(batch))


def _measure_case(name: str, rounds: int, warmup: int) -> tuple[str, list[Measure]]:
    (network,) = (case.network for case in CASES if case.name == name)
    group = dist.group.WORLD
    assert group is not None
    model = _WithLoss(network.make())
    optimizer, candidates = _optimizer(model), [candidate(PLAIN), *map(candidate, HOOKS)]
    predictions: list[Mapping[str, float]] = []

    def predict() -> None:
        found = profile_here(group, model, (network.batch(),), optimizer)
        predictions.append(predict_here(group, found, candidates).seconds)

    predict()
    auto = hooks.auto(HOOKS)
    trainings = {hook: _Training(network, hook) for hook in (PLAIN, *HOOKS)}
    trainings[OURS] = _Training(network, auto)
    for training in trainings.values():
        for _ in range(PREPARED_STEPS):
            training.step()
    start = perf_counter()
    trainings[OURS].step()
    measuring = perf_counter() - start
    while not auto.settled:
        trainings[OURS].step()
    trainings[OURS].step()  # in which it withdraws, if nothing pays
    chosen = ", ".join(dict.fromkeys(auto.state.choices.values())).replace(PLAIN, "no hook")
    steps, seconds = {hook: t.step for hook, t in trainings.items()}, _nothing(trainings)
    for part in (rounds // 2, rounds - rounds // 2):
        for hook, taken in alternate(steps, part, warmup=warmup, in_series=warmup == 0).items():
            seconds[hook] += taken
        predict()
    predicted = {hook: median(row[hook] for row in predictions) for hook in predictions[0]}
    return chosen, _measures(predicted, seconds, measuring)


def _measures(
    predicted: Mapping[str, float], seconds: Mapping[str, list[float]], measuring: float
) -> list[Measure]:
    fixed = [hook for hook in seconds if hook != OURS]
    best = min(fixed, key=lambda hook: spread(seconds[hook]).median)
    parts = {h: [predicted[h] / taken for taken in seconds[h]] for h in fixed}
    return [
        Measure(
            "step",
            "ms",
            _spreads(scaled(seconds, 1e3)),
            {hook: ratio(seconds[OURS], seconds[hook]) for hook in fixed},
        ),
        Measure("predicted", "ms", _spreads({h: [1e3 * predicted[h]] for h in fixed}), {}),
        Measure("predicted", "% of measured", _spreads(scaled(parts, 100)), {}),
        Measure(
            "auto's step",
            "% of the best fixed choice's",
            _spreads({OURS: [100 * ratio(seconds[OURS], seconds[best]).value]}),
            {},
        ),
        Measure("the step in which auto measures", "ms", _spreads({OURS: [1e3 * measuring]}), {}),
    ]


def _spreads(samples: Mapping[str, list[float]]) -> dict[str, Spread]:
    return {name: spread(taken) for name, taken in samples.items()}


BENCHMARK = Benchmark(
    "plan",
    "Steps on links of limited rates: predicted, measured, and with auto",
    CASES,
    measure,
    rounds=9,
    over_hosts=True,
)
