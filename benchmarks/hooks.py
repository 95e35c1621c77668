"""A training step with each communication hook that compresses, beside torch's own under its DDP.

The link is this host's, as fast as memory: what is seen is what hooks compute to save bytes, and
how many bytes they save. On a link that is slow enough the second is worth the first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel

from benchmarks import models, training
from benchmarks.alternate import OURS, alternate
from benchmarks.benchmark import Benchmark
from benchmarks.launch import launch
from benchmarks.options import Options
from benchmarks.progress import say
from benchmarks.results import CaseResult, Measure
from benchmarks.stats import scaled
from benchmarks.training import Training
from benchmarks.uses import LARGE_BUCKET_MB, power_sgd
from gradwire import hooks
from gradwire.ddp import DistributedDataParallel

__all__ = ["BENCHMARK", "Case", "measure"]

NO_HOOK = "gradwire, no hook"
PREPARED_STEPS = 14
"""Before any is timed."""
SHAPE = (32, 1024)


@dataclass(frozen=True)
class Case:
    """A hook of ours, by how it is made."""

    name: str
    make: Callable[[], Any]
    expected: str


CASES = [
    Case("all_reduce", lambda: hooks.all_reduce, "what any hook costs: packing, and a vote"),
    Case("bf16", lambda: hooks.bf16, "half the bytes; two passes more"),
    Case("int8", lambda: hooks.BlockQuantization(8), "0.25 of the bytes; some 25 passes"),
    Case("int4", lambda: hooks.BlockQuantization(4), "0.13 of the bytes; some 25 passes"),
]


def _fp16(net: TorchDistributedDataParallel) -> None:
    net.register_comm_hook(None, default_hooks.fp16_compress_hook)


def _power_sgd(net: TorchDistributedDataParallel) -> None:
    net.register_comm_hook(power_sgd(), power.powerSGD_hook)


PEERS: dict[str, Callable[[TorchDistributedDataParallel], None]] = {
    "torch": lambda net: None,
    "torch, fp16": _fp16,
    "torch, PowerSGD": _power_sgd,
}


def measure(cases: Sequence[Case], options: Options, layers: int = 6) -> list[CaseResult]:
    """Each hook's steps, taken in one launch."""
    names = [case.name for case in cases]
    timed = launch(
        _time,
        names,
        options.rounds,
        layers,
        world_size=options.world_size,
        backend=options.backend,
    )
    return [
        CaseResult(case.name, f"Expected: {case.expected}.", options.rounds, measures)
        for case, measures in zip(cases, timed, strict=True)
    ]


def _time(names: Sequence[str], rounds: int, layers: int) -> list[list[Measure]]:
    return [_time_case(case, rounds, layers) for case in CASES if case.name in names]


def _time_case(case: Case, rounds: int, layers: int) -> list[Measure]:
    say(case.name)
    network = training.Case("MLP", partial(models.mlp, layers), SHAPE, "", memory=False)
    trainings = {
        OURS: Training(network).wrap(partial(_ours, case.make())),
        NO_HOOK: Training(network).wrap(partial(_ours, None)),
    }
    for name, register in PEERS.items():
        trainings[name] = Training(network).wrap(partial(_torchs, register))
    for trained in trainings.values():
        for _ in range(PREPARED_STEPS):
            trained.step()
    sent = {name: [_megabytes(name, trained)] for name, trained in trainings.items()}
    seconds = alternate({name: trained.step for name, trained in trainings.items()}, rounds)
    return [
        Measure.of("step", "ms", scaled(seconds, 1e3)),
        Measure.of("sent by a rank", "MB", sent),
    ]


def _ours(hook: Any, module: nn.Module) -> nn.Module:
    net = DistributedDataParallel(module, bucket_cap_mb=LARGE_BUCKET_MB)
    net.register_comm_hook(None, hook)
    return net


def _torchs(
    register: Callable[[TorchDistributedDataParallel], None], module: nn.Module
) -> nn.Module:
    net = TorchDistributedDataParallel(module, bucket_cap_mb=LARGE_BUCKET_MB)
    register(net)
    return net


def _megabytes(name: str, trained: Training) -> float:
    """Return the traffic of one step, counted at torch.distributed's functions."""
    sent: list[float] = []
    with _counted(sent):
        trained.step()
    if not sent:  # no hook: one all_reduce of everything, from C++ in torch's
        size = dist.get_world_size()
        sent = [2 * sum(g.nbytes for g in trained.gradients()) * (size - 1) / size]
    return sum(sent) / 1e6


@contextlib.contextmanager
def _counted(sent: list[float]) -> Iterator[None]:
    """Append the bytes that a rank sends for each collective of a hook, from whichever thread."""
    real = dist.all_reduce, dist.all_gather, dist.all_to_all_single
    size = dist.get_world_size()

    def all_reduce(tensor: Any, *args: Any, **others: Any) -> Any:
        sent.append(2 * tensor.nbytes * (size - 1) / size)
        return real[0](tensor, *args, **others)

    def all_gather(received: Any, own: Any, *args: Any, **others: Any) -> Any:
        sent.append(own.nbytes * (size - 1))
        return real[1](received, own, *args, **others)

    def all_to_all_single(received: Any, rows: Any, *args: Any, **others: Any) -> Any:
        sent.append(rows.nbytes * (size - 1) / size)
        return real[2](received, rows, *args, **others)

    named: dict[str, Any] = {
        "all_reduce": all_reduce,
        "all_gather": all_gather,
        "all_to_all_single": all_to_all_single,
    }
    for name, function in named.items():
        setattr(dist, name, function)
    try:
        yield
    finally:
        for name, function in zip(named, real, strict=True):
            setattr(dist, name, function)


BENCHMARK = Benchmark(
    "hooks", "A training step with hooks that compress, beside torch's", CASES, measure, rounds=15
)
