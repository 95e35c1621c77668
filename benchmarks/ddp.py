"""A training step under DistributedDataParallel: ours, torch's, and the step that both wrap."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from time import perf_counter

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import models, uses
from benchmarks.alternate import OURS, alternate, order
from benchmarks.benchmark import Benchmark
from benchmarks.launch import launch
from benchmarks.memory import peak
from benchmarks.options import Options
from benchmarks.progress import say
from benchmarks.results import CaseResult, Measure
from benchmarks.stats import difference_ratio, ratio, scaled, spread
from benchmarks.training import BARE, GLOO, TORCH, Case, Training, Wrapper, peers, wrappers
from gradwire.ddp.buckets.assignment import IN_PLACE_BYTES

__all__ = ["BENCHMARK", "measure"]

MEMORY_LAUNCHES = 3
STARTS = 6
ROUNDING = 1e-6
"""The largest difference between gradients, in units of a parameter's largest one."""

CASES = [
    Case(
        "200 x linear 64",
        models.linear_layers,
        (128, 64),
        "step 1.0, exposed 0.9 to 1, memory 1.0",
        times=2,
    ),
    Case("MLP 6 x 1024", models.mlp, (128, 1024), "step 0.9 to 1, exposed 0.8 to 0.9, memory 0.6"),
    Case(
        "transformer 6 x 256",
        models.transformer,
        (2, 64, 256),
        "step 0.95 to 1, exposed 0.8 to 1, memory 1.0",
    ),
    *(
        Case(
            f"1000 x linear 8, {name}",
            partial(models.linear_layers, layers=1000, width=8),
            (16, 8),
            "step at most 1",
            options=options,
            memory=False,
        )
        for name, options in (
            ("plain", {}),
            ("find_unused_parameters", {"find_unused_parameters": True}),
            ("static_graph", {"static_graph": True}),
        )
    ),
]


def measure(cases: Sequence[Case], options: Options) -> list[CaseResult]:
    """Each case's steps, taken in one launch, and its peak memory, in one for each contender."""
    backend, results = options.backend, {}
    for ranks in sorted({options.world_size or case.ranks for case in cases}):
        chosen = [case for case in cases if (options.world_size or case.ranks) == ranks]
        there = replace(options, world_size=ranks)
        timed = launch(_time, chosen, options.rounds, backend, world_size=ranks, backend=backend)
        for case, measures in zip(chosen, timed, strict=True):
            memory = [_memory(case, there)] if case.memory else []
            rounds = options.rounds * case.times
            results[case.name] = CaseResult(
                case.name, _prediction(case), rounds, [*measures, *memory]
            )
    return [results[case.name] for case in cases]


def _time(cases: Sequence[Case], rounds: int, backend: str) -> list[list[Measure]]:
    contenders = wrappers(backend)
    return [_time_case(case, rounds * case.times, contenders) for case in cases]


def _time_case(case: Case, rounds: int, contenders: Mapping[str, Wrapper]) -> list[Measure]:
    say(f"{case.name}, time")
    starts = _starts(case, contenders) if case.starts else []
    trainings = {name: Training(case).wrap(wrapper) for name, wrapper in contenders.items()}
    others = [name for name in contenders if name not in (OURS, BARE)]
    _check(trainings, others, exact=case.exact)
    seconds = alternate({name: t.step for name, t in trainings.items()}, rounds)
    ms = scaled(seconds, 1e3)
    exposed = {
        name: [step - bare for step, bare in zip(ms[name], ms[BARE], strict=True)]
        for name in (OURS, *others)
    }
    measures = [
        Measure.of("step", "ms", ms, peers=others),
        Measure(
            "exposed",
            "ms",
            {name: spread(samples) for name, samples in exposed.items()},
            {peer: difference_ratio(ms[OURS], ms[peer], ms[BARE]) for peer in others},
        ),
    ]
    if GLOO in contenders:  # what the backend does for torch's own wrapper
        both = {name: spread(ms[name]) for name in (TORCH, GLOO)}
        measures.append(Measure("torch's step", "ms", both, {GLOO: ratio(ms[TORCH], ms[GLOO])}))
    return [*measures, *starts]


def _starts(case: Case, contenders: Mapping[str, Wrapper]) -> list[Measure]:
    """Return the times of construction and of the first step."""
    names = [name for name in contenders if name != BARE]
    taken: dict[str, dict[str, list[float]]] = {
        what: {name: [] for name in names} for what in ("construction", "first step")
    }
    for number in range(STARTS):
        for name in order(names, number):
            training = Training(case)
            dist.barrier()
            began = perf_counter()
            training.wrap(contenders[name])
            wrapped = perf_counter()
            training.step()
            taken["construction"][name].append(1e3 * (wrapped - began))
            taken["first step"][name].append(1e3 * (perf_counter() - wrapped))
    return [Measure.of(what, "ms", samples) for what, samples in taken.items()]


def _memory(case: Case, options: Options) -> Measure:
    say(f"{case.name}, memory")
    names = [OURS, *peers(options.backend)]
    peaks: dict[str, list[float]] = {name: [] for name in names}
    for number in range(MEMORY_LAUNCHES):
        for name in order(names, number):
            peaks[name].append(peak(case, name, options))
    return Measure.of("peak memory", "MB", peaks)


def _check(trainings: Mapping[str, Training], others: Sequence[str], *, exact: bool = True) -> None:
    """Fails unless gradients are the peers' to rounding, with the same bits on all ranks.

    Three steps: both contenders rebuild their buckets after the first.
    """
    for number in range(3):
        for training in trainings.values():
            training.step()
        ours = trainings[OURS].gradients()
        for name in (OURS, *others):
            theirs = trainings[name].gradients()
            for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if exact else ():
                difference, scale = (a - b).abs().max().item(), b.abs().max().item()
                if not difference <= ROUNDING * scale:
                    raise AssertionError(
                        f"step {number}: gradient {i} of shape {tuple(a.shape)} differs from "
                        f"{name}'s by {difference:.3g}, where its largest value is {scale:.3g}"
                    )
            _check_bits(name, theirs)


def _check_bits(name: str, gradients: Sequence[Tensor]) -> None:
    bits = torch.cat([gradient.flatten().view(torch.int32) for gradient in gradients])
    root = bits.clone()
    dist.broadcast(root, 0)
    if not torch.equal(bits, root):
        raise AssertionError(
            f"{name} left other bits in the gradients of rank {dist.get_rank()} than of rank 0"
        )


def _prediction(case: Case) -> str:
    """Passes over the gradients' bytes beside the collective's own, and steps in Python."""
    sizes = [parameter.nbytes for parameter in case.model().parameters()]
    in_place = sum(size for size in sizes if size >= IN_PLACE_BYTES)
    return (
        f"{len(sizes)} gradients of {sum(sizes) / 1e6:.3g} MB. torch: 2 passes over them, a copy "
        f"for each into its bucket and one back. gradwire: 1 pass over {in_place / 1e6:.3g} MB "
        "that travel in place, 2 over the others, in one call for all small ones of a bucket; 1 to "
        f"4 Python steps a gradient. Expected ratios: {case.expected}."
    )


BENCHMARK = Benchmark(
    "ddp",
    "A training step under DistributedDataParallel",
    CASES,
    measure,
    rounds=60,
    in_full=Benchmark(
        "ddp_all",
        "A step with each option, hook and kind of program that people switch on",
        uses.CASES,
        measure,
        rounds=20,
    ),
)
