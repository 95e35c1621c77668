"""broadcast_coalesced on models' tensors: ours and torch's, from rank 0 to all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from benchmarks import shapes
from benchmarks.alternate import OURS, alternate
from benchmarks.benchmark import Benchmark
from benchmarks.launch import launch
from benchmarks.options import Options
from benchmarks.progress import say
from benchmarks.results import CaseResult, Measure
from benchmarks.stats import scaled
from benchmarks.training import GLOO, TORCH
from gradwire.ddp import broadcast_coalesced
from gradwire.ddp.broadcast import IN_PLACE_BYTES

__all__ = ["BENCHMARK", "Case", "contenders", "measure"]

Broadcast = Callable[[Sequence[Tensor]], None]

BUFFER_SIZE = 250 << 20
"""Bucket sizes that torch's DistributedDataParallel passes for parameters and buffers."""


@dataclass(frozen=True)
class Case:
    """A list of tensors, and the ratio to torch's time that is expected for it.

    A case that takes little time is given more rounds: `times` as many as were asked for.
    """

    name: str
    tensors: Callable[[], list[Tensor]]
    expected: str
    times: int = 1


CASES = [
    Case("ResNet-50", shapes.resnet50, "0.4 to 0.5"),
    Case("GPT-2 small", shapes.gpt2_small, "0.4"),
    Case("ViT-B/16", shapes.vit_b16, "0.4"),
    Case("1000 x 1 KB", shapes.many_small, "0.7 to 1", times=5),
    Case("1 x 100 MB", shapes.one_large, "1", times=2),
]


def _ours(group: ProcessGroup, tensors: Sequence[Tensor]) -> None:
    broadcast_coalesced(group, tensors, BUFFER_SIZE, 0)


def _torch(group: ProcessGroup, tensors: Sequence[Tensor]) -> None:
    dist._broadcast_coalesced(group, list(tensors), BUFFER_SIZE, 0)


def contenders(backend: str) -> dict[str, Broadcast]:
    """Ours and torch's on a default group of this backend; on shm, torch's on Gloo too."""
    world = dist.group.WORLD
    assert world is not None
    calls: dict[str, Broadcast] = {OURS: partial(_ours, world), TORCH: partial(_torch, world)}
    if backend == "shm":
        calls[GLOO] = partial(_torch, dist.new_group(backend="gloo"))
    return calls


def measure(cases: Sequence[Case], options: Options) -> list[CaseResult]:
    """Each case's times, taken in one launch."""
    backend = options.backend
    return launch(
        _measure, cases, options.rounds, backend, world_size=options.world_size, backend=backend
    )


def _measure(cases: Sequence[Case], rounds: int, backend: str) -> list[CaseResult]:
    calls = contenders(backend)
    return [_measure_case(case, rounds, calls) for case in cases]


def _measure_case(case: Case, rounds: int, calls: Mapping[str, Broadcast]) -> CaseResult:
    say(case.name)
    specs = case.tensors()
    for name, broadcast in calls.items():
        _check(name, broadcast, specs)
    tensors = list(_values(specs, seed=0))
    steps = {name: partial(call, tensors) for name, call in calls.items()}
    rounds *= case.times
    seconds = alternate(steps, rounds)
    time = Measure.of("time", "ms", scaled(seconds, 1e3))
    return CaseResult(case.name, _prediction(case, specs), rounds, [time])


def _check(name: str, broadcast: Broadcast, specs: Sequence[Tensor]) -> None:
    """Fails unless the root's values arrive where others were."""
    tensors = list(_values(specs, seed=dist.get_rank()))
    broadcast(tensors)
    for i, (tensor, sent) in enumerate(zip(tensors, _values(specs, seed=0), strict=True)):
        if not torch.equal(tensor, sent):
            raise AssertionError(
                f"{name}'s broadcast left tensors[{i}] of shape {tuple(tensor.shape)} on rank "
                f"{dist.get_rank()} with values that are not rank 0's"
            )


def _values(specs: Sequence[Tensor], seed: int) -> Iterable[Tensor]:
    """Tensors of these shapes and dtypes with values that depend on the seed, one at a time."""
    generator = torch.Generator().manual_seed(seed)
    for spec in specs:
        yield torch.empty(spec.shape, dtype=spec.dtype).random_(0, 1 << 20, generator=generator)


def _prediction(case: Case, specs: Sequence[Tensor]) -> str:
    """Bytes that are copied before or after they travel, and steps for each tensor."""
    total = sum(t.nbytes for t in specs)
    in_place = sum(t.nbytes for t in specs if t.nbytes >= IN_PLACE_BYTES)
    small = [t.nbytes for t in specs if t.nbytes < IN_PLACE_BYTES]
    copied = total if len(specs) > 1 else 0  # torch's packing of a single tensor is a view
    return (
        f"{len(specs)} tensors of {_mb(total)}. torch: every rank packs and unpacks "
        f"{_mb(copied)}, one copy for each tensor. gradwire: {_mb(in_place)} travels in place; the "
        f"root packs {_mb(sum(small))}, the others unpack it, with {len(small)} tensors touched "
        f"in Python. Expected ratio: {case.expected}."
    )


def _mb(size: int) -> str:
    return f"{size / 1e6:.3g} MB"


BENCHMARK = Benchmark(
    "broadcast", "broadcast_coalesced of models' tensors from rank 0", CASES, measure, rounds=40
)
