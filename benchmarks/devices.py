"""The ops between logical replicas of the CPU: ours, and torch's algorithms written out.

PyTorch's own functions refuse the CPU. What they do between two places is restated here with torch
ops: replicas are flattened bucket by bucket, moved as one copy, added in place. Where the inputs of
a sum are on one device already PyTorch copies none of them; that is a contender of its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _take_tensors, _unflatten_dense_tensors

from benchmarks import shapes
from benchmarks.alternate import OURS, alternate
from benchmarks.benchmark import Benchmark
from benchmarks.launch import launch
from benchmarks.options import Options
from benchmarks.progress import say
from benchmarks.results import CaseResult, Measure
from benchmarks.stats import scaled
from gradwire.devices import DataParallel, broadcast_coalesced, reduce_add, reduce_add_coalesced

__all__ = ["BENCHMARK", "Case", "measure"]

BUFFER_SIZE = 10 << 20
TORCH, NO_COPIES, FLOOR = "torch", "torch, one device", "copying in place"
Steps = Mapping[str, Callable[[], object]]


@dataclass(frozen=True)
class Case:
    """An op on k replicas: what makes its contenders, and what is expected by counting passes."""

    name: str
    steps: Callable[[], Steps]
    expected: str


def _torch_reduce_add(inputs: Sequence[Tensor], *, elsewhere: bool = True) -> Tensor:
    """Every input but the first is copied to the destination, if it is elsewhere, then added."""

    def moved(tensor: Tensor) -> Tensor:
        return tensor.clone() if elsewhere else tensor

    total = inputs[0] + moved(inputs[1])
    for other in inputs[2:]:
        total.add_(moved(other))
    return total


def _torch_reduce_add_coalesced(
    replicas: Sequence[Sequence[Tensor]], *, elsewhere: bool = True
) -> list[Tensor]:
    """Each replica is flattened bucket by bucket; the flat tensors are added."""
    results: list[Tensor] = []
    for buckets in zip(*(_take_tensors(r, BUFFER_SIZE) for r in replicas), strict=True):
        flats = [_flatten_dense_tensors(bucket) for bucket in buckets]
        total = _torch_reduce_add(flats, elsewhere=elsewhere)
        results += [t.data for t in _unflatten_dense_tensors(total, buckets[0])]
    return results


def _torch_broadcast_coalesced(tensors: Sequence[Tensor], k: int) -> list[list[Tensor]]:
    """Flattened bucket by bucket, even for one place; every other place gets a copy of that."""
    replicas: list[list[Tensor]] = [list(tensors), *([] for _ in range(k - 1))]
    for bucket in _take_tensors(tensors, BUFFER_SIZE):
        flat = _flatten_dense_tensors(bucket)
        for replica in replicas[1:]:
            replica += [t.data for t in _unflatten_dense_tensors(flat.clone(), bucket)]
    return replicas


def _copying(targets: Sequence[Sequence[Tensor]], sources: Sequence[Sequence[Tensor]]) -> None:
    """Nothing but copies into memory that exists: what the memory's speed allows."""
    for target, source in zip(targets, sources, strict=True):
        torch._foreach_copy_(list(target), list(source))


def _bytes_of_a_sum(replicas: Sequence[Sequence[Tensor]]) -> Callable[[], object]:
    """Copy as many bytes as a sum of k replicas must move: k read, one written.

    That is (k+1)/2 copies, for an even k: each replica into the next, and half of one once more.
    """
    half = [[t.view(-1)[: t.numel() // 2] for t in replica] for replica in replicas[:2]]
    return partial(_copying, [*replicas[1::2], half[1]], [*replicas[::2], half[0]])


def _adding(k: int, mebibytes: int) -> Steps:
    inputs = [torch.randn(mebibytes << 18) for _ in range(k)]
    steps: dict[str, Callable[[], Any]] = {
        OURS: partial(reduce_add, inputs),
        TORCH: partial(_torch_reduce_add, inputs),
        NO_COPIES: partial(_torch_reduce_add, inputs, elsewhere=False),
    }
    expected = _torch_reduce_add(inputs)
    for name, step in steps.items():
        _check(name, [step()], [expected])
    return steps | {FLOOR: _bytes_of_a_sum([[t] for t in inputs])}


def _adding_many(k: int, specs: Callable[[], list[Tensor]]) -> Steps:
    replicas = [_values(specs()) for _ in range(k)]
    steps: dict[str, Callable[[], Any]] = {
        OURS: partial(reduce_add_coalesced, replicas),
        TORCH: partial(_torch_reduce_add_coalesced, replicas),
        NO_COPIES: partial(_torch_reduce_add_coalesced, replicas, elsewhere=False),
    }
    expected = [_torch_reduce_add(column) for column in zip(*replicas, strict=True)]
    for name, step in steps.items():
        _check(name, step(), expected)
    return steps | {FLOOR: _bytes_of_a_sum(replicas)}


def _broadcasting(k: int, specs: Callable[[], list[Tensor]]) -> Steps:
    tensors = _values(specs())
    steps: dict[str, Callable[[], Any]] = {
        OURS: partial(broadcast_coalesced, tensors, ["cpu"] * k, BUFFER_SIZE),
        TORCH: partial(_torch_broadcast_coalesced, tensors, k),
    }
    for name, step in steps.items():
        for replica in step():
            _check(name, replica, tensors)
    if k > 1:
        targets = [[torch.zeros_like(t) for t in tensors] for _ in range(k - 1)]
        steps[FLOOR] = partial(_copying, targets, [tensors] * (k - 1))
    return steps


def _forward(k: int) -> Steps:
    module = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8)))
    x, model = torch.randn(2 * k, 1024), DataParallel(module, ["cpu"] * k)
    parameters = [p.detach() for p in module.parameters()]
    targets = [[torch.zeros_like(p) for p in parameters] for _ in range(k - 1)]

    def run() -> object:
        with torch.no_grad():
            return model(x)

    return {OURS: run, FLOOR: partial(_copying, targets, [parameters] * (k - 1))}


def _values(specs: Sequence[Tensor]) -> list[Tensor]:
    """Tensors of these shapes, of the dtype that is added: the models' few counters are too."""
    return [torch.randn(spec.shape) for spec in specs]


def _check(name: str, results: Any, expected: Sequence[Tensor]) -> None:
    for i, (result, right) in enumerate(zip(results, expected, strict=True)):
        if not torch.equal(result, right):
            raise AssertionError(f"{name}'s result {i} of shape {tuple(right.shape)} is wrong")


def _cases() -> list[Case]:
    cases = [
        Case(
            f"reduce_add, {k} x {size} MiB",
            partial(_adding, k, size),
            f"Passes over {size} MiB: gradwire {k + 1}, torch {5 * (k - 1)}, on one device "
            f"{3 * (k - 1)}. Expected ratio to torch: at most 1/3.",
        )
        for k, size in ((4, 64), (8, 32))
    ]
    # Eight times GPT-2 is 4 GB, and as much again for the peer: too much for a small host.
    models = (("ResNet-50", shapes.resnet50, (4, 8)), ("GPT-2 small", shapes.gpt2_small, (4,)))
    for model, specs, sums in models:
        for k in sums:
            cases.append(
                Case(
                    f"reduce_add_coalesced, {k} x {model}",
                    partial(_adding_many, k, specs),
                    f"Passes: gradwire {k + 1}, torch {2 * k + 5 * (k - 1)}, on one device "
                    f"{2 * k + 3 * (k - 1)}; part of torch's stay in a cache of 32 MB. Expected "
                    "ratio: 1/5 to 1/3.",
                )
            )
        for k in (1, 2, 4):
            cases.append(
                Case(
                    f"broadcast_coalesced, {k} x {model}",
                    partial(_broadcasting, k, specs),
                    _broadcast_prediction(k),
                )
            )
    expected = "34 MB of parameters are copied for each of 3 replicas, as by the floor."
    return [*cases, Case("DataParallel forward, 4 replicas", partial(_forward, 4), expected)]


def _broadcast_prediction(k: int) -> str:
    if k == 1:
        return "Passes: gradwire 0, torch 2 but for a tensor that fills a buffer. Nearly 0."
    return (
        f"Passes: gradwire {2 * (k - 1)}, torch {2 * k}, 2 less for a tensor that fills a buffer. "
        f"Without a cache {(k - 1) / k:.2f}; a bucket that stays in a cache of 32 MB is flattened "
        "at little cost, and pages that are touched first cost both the same: up to 1."
    )


CASES = _cases()


def measure(cases: Sequence[Case], options: Options) -> list[CaseResult]:
    """Each case's times, taken in one process that uses all cores."""
    return launch(_measure, cases, options.rounds, world_size=1, backend="gloo")


def _measure(cases: Sequence[Case], rounds: int) -> list[CaseResult]:
    torch.set_num_threads(os.cpu_count() or 1)
    return [_measure_case(case, rounds) for case in cases]


def _measure_case(case: Case, rounds: int) -> CaseResult:
    say(case.name)
    seconds = alternate(case.steps(), rounds)
    time = Measure.of("time", "ms", scaled(seconds, 1e3))
    return CaseResult(case.name, case.expected, rounds, [time])


BENCHMARK = Benchmark(
    "devices",
    "copies and sums between 4 to 8 replicas on one CPU",
    CASES,
    measure,
    rounds=15,
    one_process=True,
)
