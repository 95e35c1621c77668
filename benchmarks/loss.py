"""Time to the same loss over slow links: how many steps a method needs, and how long they take.

Steps are counted once, on an unlimited link, for three seeds: what a step computes does not depend
on the link. How long a step takes is measured on each link, where the methods take turns. The time
to the loss is the product of the two.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.alternate import alternate, repeated
from benchmarks.benchmark import Benchmark
from benchmarks.language import Corpus, Language, corpus
from benchmarks.links import RATES, bytes_passed
from benchmarks.methods import METHODS, PLAIN, Groups
from benchmarks.options import Options
from benchmarks.progress import say
from benchmarks.results import CaseResult, Measure
from benchmarks.stats import Spread, scaled, spread
from gradwire.testing import run_ranks
from gradwire.testing.hosts import Hosts

__all__ = ["BENCHMARK", "Batches", "Case", "Task", "measure"]

SECONDS = 3600.0


@dataclass(frozen=True)
class Task:
    """What is trained, and to which loss.

    Args:
        layers, width: Of the network.
        passages, length: Of each rank's batch.
        steps: In all.
        every: Steps between validations.
        loss: On held-out text, in nats a character.
        seeds: Each begins with other parameters and other batches.
    """

    layers: int = 4
    width: int = 192
    passages: int = 4
    length: int = 32
    steps: int = 300
    every: int = 10
    loss: float = 2.4
    seeds: tuple[int, ...] = (0, 1, 2)

    def network(self, seed: int) -> Language:
        """The network, equal on all ranks."""
        torch.manual_seed(seed)
        return Language(self.layers, self.width, self.length)


@dataclass(frozen=True)
class Case:
    """A link's rate in bits a second; with `slower`, rounds are the asked for divided by it."""

    name: str
    rate: float | None
    slower: int = 1
    task: Task = Task()
    methods: Sequence[str] = tuple(METHODS)


CASES = [Case(name, rate, 5 if name == "10 Mbit/s" else 1) for name, rate in RATES.items()]


@dataclass(frozen=True)
class Course:
    """How a method's training went, one entry for each seed.

    Attributes:
        steps: Until the loss; infinite if it was not reached.
        final: The loss at the end.
    """

    steps: list[float]
    final: list[float]


def measure(cases: Sequence[Case], options: Options) -> list[CaseResult]:
    """Each link's times; the courses of training are the same for all.

    Raises:
        NotSupportedError: This system lets its user make no namespaces.
    """
    ranks, results = sum(options.hosts), []
    courses: dict[tuple[Task, tuple[str, ...]], dict[str, Course]] = {}
    with Hosts(options.hosts) as hosts:

        def run(work: Any, *args: object) -> Any:
            where = (*args, options.hosts)
            return run_ranks(work, ranks, hosts=hosts, args=where, timeout=SECONDS)[0]

        for case in cases:
            key = (case.task, tuple(case.methods))
            if key not in courses:
                hosts.limit(None)
                courses[key] = run(_train_all, case.task, case.methods)
            say(f"{case.name}, time of a step")
            hosts.limit(None if case.rate is None else f"{case.rate:.0f}bit")
            rounds = max(2, options.rounds // case.slower)
            seconds, passed = run(_time_steps, case.task, case.methods, rounds)
            measures = _measures(courses[key], seconds, passed)
            results.append(CaseResult(case.name, _prediction(case), rounds, measures))
    return results


def _measures(
    courses: Mapping[str, Course],
    seconds: Mapping[str, list[float]],
    passed: Mapping[str, float],
) -> list[Measure]:
    reached = {n: course for n, course in courses.items() if all(map(math.isfinite, course.steps))}
    times = {
        name: [steps * median(seconds[name]) for steps in course.steps]
        for name, course in reached.items()
    }
    measures = [_of("time to the loss", "s", times)]
    if PLAIN in times:
        faster = {
            name: [plain / own for plain, own in zip(times[PLAIN], taken, strict=True)]
            for name, taken in times.items()
        }
        measures.append(_of(f"as fast as {PLAIN}", "times", faster))
    return [
        *measures,
        _of("step", "ms", scaled(seconds, 1e3)),
        _of("steps to the loss", "", {name: course.steps for name, course in reached.items()}),
        _of("final loss", "mnat", {n: [1e3 * x for x in c.final] for n, c in courses.items()}),
        _of("bytes each way, host and step", "kB", {n: [b / 1e3] for n, b in passed.items()}),
    ]


def _of(name: str, unit: str, samples: Mapping[str, Sequence[float]]) -> Measure:
    spreads: dict[str, Spread] = {who: spread(taken) for who, taken in samples.items()}
    return Measure(name, unit, spreads, {})


def _train_all(task: Task, methods: Sequence[str], hosts: Sequence[int]) -> dict[str, Course]:
    groups = Groups.make(hosts)
    courses = {}
    for name in methods:
        found = []
        for seed in task.seeds:
            say(f"{name}, seed {seed}, {task.steps} steps")
            found.append(_train(task, name, seed, groups))
        courses[name] = Course([steps for steps, _ in found], [final for _, final in found])
    return courses


def _train(task: Task, name: str, seed: int, groups: Groups) -> tuple[float, float]:
    """Steps until the loss, and the loss at the end; equal on all ranks."""
    network = task.network(seed)
    step = METHODS[name].make(network, groups)
    batches, held_out = Batches(task, seed), corpus().held_out(64, task.length)
    reached, loss = math.inf, math.inf
    for number in range(1, task.steps + 1):
        step(batches.next())
        if number % task.every == 0:
            with torch.no_grad():
                total = network(held_out)
            dist.all_reduce(total)  # ranks may differ between averages of their parameters
            loss = total.item() / dist.get_world_size()
            if loss <= task.loss:
                reached = min(reached, number)
    return reached, loss


class Batches:
    """This rank's batches of a seed."""

    def __init__(self, task: Task, seed: int) -> None:
        self._task, self._corpus = task, corpus()
        self._generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())

    def next(self) -> Tensor:
        """The next batch."""
        text: Corpus = self._corpus
        return text.batch(self._generator, self._task.passages, self._task.length)


def _time_steps(
    task: Task, methods: Sequence[str], rounds: int, hosts: Sequence[int]
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Seconds of a step in each round, and bytes each way and host of a step, by method."""
    groups = Groups.make(hosts)
    batch = Batches(task, 0).next()
    cycles, passed = {}, {}
    for name in methods:
        method = METHODS[name]
        step = partial(method.make(task.network(0), groups), batch)
        for _ in range(max(3, method.begins)):  # wrappers assign their buckets again
            step()
        cycles[name] = repeated(step, method.cycle)
        passed[name] = bytes_passed(cycles[name]) / method.cycle
    seconds = alternate(cycles, rounds, warmup=0)
    per_step = {name: [s / METHODS[name].cycle for s in taken] for name, taken in seconds.items()}
    return per_step, passed


def _prediction(case: Case) -> str:
    count = sum(parameter.numel() for parameter in case.task.network(0).parameters())
    return (
        f"{count / 1e6:.1f} million parameters. A slow link's time is that of the bytes; on one "
        "without limit, that of computing them."
    )


BENCHMARK = Benchmark(
    "loss",
    "Time to the same loss over links of limited rates",
    CASES,
    measure,
    rounds=10,
    over_hosts=True,
)
