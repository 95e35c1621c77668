"""Time to the same loss over slow links: how many steps a method needs, and how long they take.

The loss is the one that torch's wrapper has after so many steps, for each seed. Steps are counted
once, on an unlimited link: what a step computes does not depend on the link. How long a step takes
is measured on each link, where the methods take turns. The time to the loss is the product of the
two; on one link some methods are run whole, which the product has to agree with.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

from benchmarks.alternate import alternate, repeated
from benchmarks.benchmark import Benchmark
from benchmarks.courses import Batches, Course, Task, reached, train
from benchmarks.hosts import Hosts
from benchmarks.links import RATES, bytes_passed
from benchmarks.methods import BEST, METHODS, PLAIN, Groups
from benchmarks.options import Options
from benchmarks.progress import say
from benchmarks.results import CaseResult, Measure
from benchmarks.stats import Spread, scaled, spread
from gradwire.testing import run_ranks

__all__ = ["BENCHMARK", "Case", "case_result", "count_steps", "measure", "time_steps"]

SECONDS = 3600.0
SLOWEST = 10e6

Courses = Mapping[str, Sequence[Course]]
"""Each method's, one for each seed."""
Timed = tuple[Mapping[str, Sequence[float]], Mapping[str, float]]
"""Each method's seconds of a step in each round, and bytes each way and host of a step."""
Run = Callable[..., Any]
"""Runs a function on the ranks of all hosts; what it returns on the first."""


@dataclass(frozen=True)
class Case:
    """A link.

    Args:
        name: Name in tables.
        rate: Rate in bits per second; None for no limit.
        slower: Rounds are those asked for divided by it.
        task: The training task.
        methods: Methods to compare; the first is `PLAIN`.
        whole: Methods that are also run to the end in one piece.
    """

    name: str
    rate: float | None
    slower: int = 1
    task: Task = field(default_factory=Task)
    methods: Sequence[str] = tuple(METHODS)
    whole: Sequence[str] = ()


CASES = [
    Case(
        name,
        rate,
        slower=5 if rate == SLOWEST else 1,
        whole=(PLAIN, BEST) if name == "100 Mbit/s" else (),
    )
    for name, rate in RATES.items()
]


def measure(cases: Sequence[Case], options: Options) -> list[CaseResult]:
    """Each link's times; the courses of training are the same for all.

    Raises:
        NotSupportedError: This system lets its user make no namespaces.
    """
    results = []
    courses: dict[tuple[Task, tuple[str, ...]], Courses] = {}
    with Hosts(options.hosts) as hosts:
        run = runner(hosts)
        for case in cases:
            key = (case.task, tuple(case.methods))
            if key not in courses:
                hosts.limit(None)
                courses[key] = run(count_steps, case.task, case.methods, {})
            results.append(measure_link(case, courses[key], options.rounds, hosts, run))
    return results


def runner(hosts: Hosts) -> Run:
    """Runs functions whose last argument is how many ranks each host has."""

    def run(work: Callable[..., Any], *args: object) -> Any:
        where = (*args, hosts.ranks)
        return run_ranks(work, sum(hosts.ranks), hosts=hosts, args=where, timeout=SECONDS)[0]

    return run


def count_steps(
    task: Task, methods: Sequence[str], known: Courses, hosts: Sequence[int]
) -> dict[str, list[Course]]:
    """The methods' courses, and those that are known."""
    groups = Groups.make(hosts)
    courses = {name: list(course) for name, course in known.items()}
    for name in methods:
        if name in courses:
            continue
        courses[name] = []
        for number, seed in enumerate(task.seeds):
            say(f"{name}, seed {seed}, {task.steps} steps or more")
            loss = math.inf if name == PLAIN else _at_end(task, courses[PLAIN][number])
            courses[name].append(train(task, name, seed, groups, loss=loss, least=task.steps))
    return courses


def measure_link(case: Case, courses: Courses, rounds: int, hosts: Hosts, run: Run) -> CaseResult:
    """A link's times, and what follows from them."""
    hosts.limit(None if case.rate is None else f"{case.rate:.0f}bit")
    say(f"{case.name}, time of a step")
    rounds = max(2, rounds // case.slower)
    timed = run(time_steps, case.task, case.methods, rounds)
    losses = [_at_end(case.task, course) for course in courses[PLAIN]]
    whole = run(_run_whole, case.task, case.whole, losses) if case.whole else {}
    return case_result(case, courses, rounds, timed, whole)


def case_result(
    case: Case, courses: Courses, rounds: int, timed: Timed, whole: Mapping[str, Sequence[float]]
) -> CaseResult:
    """Compute the case's result from loss curves, step times, and times of whole runs."""
    seconds, passed = timed
    measures = _measures(case, courses, seconds, whole)
    bytes_ = {name: [each / 1e3] for name, each in passed.items()}
    measures.append(_of("bytes each way, host and step", "kB", bytes_))
    return CaseResult(case.name, _prediction(case), rounds, measures)


def _at_end(task: Task, course: Course) -> float:
    return course.losses[task.steps // task.every - 1]


def _run_whole(
    task: Task, names: Sequence[str], losses: Sequence[float], hosts: Sequence[int]
) -> dict[str, list[float]]:
    """Seconds to each seed's loss, on the link as it is."""
    groups = Groups.make(hosts)
    found: dict[str, list[float]] = {}
    for name in names:
        found[name] = []
        for seed, loss in zip(task.seeds, losses, strict=True):
            say(f"{name}, seed {seed}, as a whole")
            course = train(task, name, seed, groups, loss=loss)
            found[name].append(reached(course.losses, loss, course.seconds))
    return found


def time_steps(task: Task, methods: Sequence[str], rounds: int, hosts: Sequence[int]) -> Timed:
    """Seconds of a step in each round, and bytes each way and host of a step, by method."""
    groups = Groups.make(hosts)
    batch = Batches(task, 0).next()
    cycles: dict[str, Callable[[], None]] = {}
    passed: dict[str, float] = {}
    for name in methods:
        method = METHODS[name]
        step = partial(method.make(task.network(0), groups), batch)
        for _ in range(method.cycle * -(-max(3, method.begins) // method.cycle)):
            step()  # wrappers assign their buckets again; then a whole cycle begins
        cycles[name] = repeated(step, method.cycle)
        passed[name] = bytes_passed(cycles[name]) / method.cycle
    seconds = alternate(cycles, rounds, warmup=0)
    per_step = {name: [s / METHODS[name].cycle for s in taken] for name, taken in seconds.items()}
    return per_step, passed


def _measures(
    case: Case,
    courses: Courses,
    seconds: Mapping[str, Sequence[float]],
    whole: Mapping[str, Sequence[float]],
) -> list[Measure]:
    task = case.task
    losses = [_at_end(task, course) for course in courses[PLAIN]]
    steps = {n: _steps(task, courses[n], losses) for n in seconds if n in courses}
    steps = {name: each for name, each in steps.items() if all(map(math.isfinite, each))}
    times = {name: [_time(name, n, seconds) for n in each] for name, each in steps.items()}
    faster = {
        name: [plain / own for plain, own in zip(times[PLAIN], taken, strict=True)]
        for name, taken in times.items()
    }
    final = {name: [1e3 * _at_end(task, c) for c in each] for name, each in courses.items()}
    by_seed = [
        _of_seeds(f"as fast as {PLAIN}", "times", faster),
        _of_seeds("time to the loss", "s", times),
        _of_seeds("time to the loss, run whole", "s", whole),
        _of_seeds("steps to the loss", "", steps),
        _of_seeds(f"loss after {task.steps} steps", "mnat", final),
    ]
    return [
        *(each for each in by_seed if each.contenders),
        _of("step", "ms", scaled(seconds, 1e3)),
    ]


def _steps(task: Task, courses: Sequence[Course], losses: Sequence[float]) -> list[float]:
    """Each seed's steps to its loss."""
    at = range(task.every, task.limit + 1, task.every)
    pairs = zip(courses, losses, strict=True)
    return [reached(course.losses, loss, at) for course, loss in pairs]


def _time(name: str, steps: float, seconds: Mapping[str, Sequence[float]]) -> float:
    """Seconds of so many steps, the first of which are plain."""
    plain = min(steps, METHODS[name].begins)
    return plain * median(seconds[PLAIN]) + (steps - plain) * median(seconds[name])


def _of(name: str, unit: str, samples: Mapping[str, Sequence[float]]) -> Measure:
    return Measure(name, unit, {who: spread(taken) for who, taken in samples.items()}, {})


def _of_seeds(name: str, unit: str, samples: Mapping[str, Sequence[float]]) -> Measure:
    """Medians with the smallest and largest: quartiles of three seeds would say less."""
    spreads = {who: Spread(median(x), min(x), max(x)) for who, x in samples.items()}
    return Measure(name, unit, spreads, {})


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
