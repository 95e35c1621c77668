"""all_reduce between hosts over slow links: ours, hierarchical, and Gloo's over all ranks.

Hosts are network namespaces of this machine with a cable to a switch, whose rate is limited. What
passes a cable is counted by the kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.alternate import OURS, alternate
from benchmarks.benchmark import Benchmark
from benchmarks.hosts import INTERFACE, Hosts
from benchmarks.options import Options
from benchmarks.progress import say
from benchmarks.results import CaseResult, Measure
from benchmarks.stats import Spread, ratio, scaled, spread
from gradwire import shm
from gradwire.testing import run_ranks

__all__ = ["BENCHMARK", "RATES", "Case", "bytes_passed", "measure"]

RATES = {"10 Mbit/s": 10e6, "100 Mbit/s": 100e6, "1 Gbit/s": 1e9, "no limit": None}
"""Bits a second of a cable in each direction, by the name in a case's."""
GLOO = "Gloo"
IN_SEGMENT = "gradwire, shm.empty"
SECONDS = 900.0


@dataclass(frozen=True)
class Case:
    """An all_reduce of so many bytes of float32 between hosts.

    A case that takes long is given fewer rounds: the asked for divided by `slower`.
    """

    name: str
    nbytes: int
    rate: float | None
    slower: int = 1


CASES = [
    Case(f"{size // 10**6} MB, {name}", size, rate, slower)
    for name, rate, slower in (
        ("10 Mbit/s", RATES["10 Mbit/s"], 8),
        ("100 Mbit/s", RATES["100 Mbit/s"], 3),
        ("1 Gbit/s", RATES["1 Gbit/s"], 1),
        ("no limit", None, 1),
    )
    for size in (1_000_000, 26_000_000, 100_000_000)
    if rate is None or size / rate < 1
]


def measure(cases: Sequence[Case], options: Options) -> list[CaseResult]:
    """Each case's times and bytes, in one launch.

    Raises:
        NotSupportedError: This system lets its user make no namespaces.
    """
    results = []
    with Hosts(options.hosts) as hosts:
        for case in cases:
            say(case.name)
            hosts.limit(None if case.rate is None else f"{case.rate:.0f}bit")
            rounds = max(3, options.rounds // case.slower)
            measures = run_ranks(
                _measure_case,
                sum(options.hosts),
                hosts=hosts,
                args=(case, rounds, len(options.hosts)),
                timeout=SECONDS,
            )[0]
            results.append(CaseResult(case.name, _prediction(case, options), rounds, measures))
    return results


def _measure_case(case: Case, rounds: int, hosts: int) -> list[Measure]:
    gloo = dist.new_group(backend="gloo")
    count = case.nbytes // 4
    private, shared, theirs = torch.empty(count), shm.empty(count), torch.empty(count)
    steps: dict[str, Callable[[], object]] = {
        OURS: lambda: dist.all_reduce(private),
        IN_SEGMENT: lambda: dist.all_reduce(shared),
        GLOO: lambda: dist.all_reduce(theirs, group=gloo),
    }
    tensors = {OURS: private, IN_SEGMENT: shared, GLOO: theirs}
    for tensor in tensors.values():
        tensor.copy_(torch.arange(count) % 97 + dist.get_rank())
    passed = {name: bytes_passed(step) / case.nbytes * 100 for name, step in steps.items()}
    for name, tensor in tensors.items():
        if not torch.equal(tensor, theirs):
            raise AssertionError(f"{name} does not have Gloo's sums")
        tensor.zero_()  # which sums leave as it is
    seconds = alternate(steps, rounds, warmup=1)
    measures = [Measure.of("all_reduce", "ms", scaled(seconds, 1e3), peers=[GLOO])]
    if case.rate is not None:
        limit = 2 * (hosts - 1) / hosts * case.nbytes * 8 / case.rate
        of_limit = scaled(seconds, 100 / limit)
        measures.append(Measure("time", "% of the link's limit", _spreads(of_limit), {}))
    bytes_ = {name: [value] for name, value in passed.items()}
    measures.append(
        Measure(
            "bytes each way and host",
            "% of the tensor's",
            _spreads(bytes_),
            {GLOO: ratio(bytes_[OURS], bytes_[GLOO])},
        )
    )
    return measures


def _spreads(samples: dict[str, list[float]]) -> dict[str, Spread]:
    return {name: spread(taken) for name, taken in samples.items()}


def bytes_passed(step: Callable[[], object]) -> float:
    """Bytes that pass each host's cable in a step: those of the host and direction with most."""
    dist.barrier()
    before = _passed()
    dist.barrier()
    step()
    dist.barrier()
    most = torch.tensor([float(max(b - a for a, b in zip(before, _passed(), strict=True)))])
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return most.item()


def _passed() -> tuple[int, int]:
    """Bytes that this host has received and sent."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == INTERFACE:
            fields = numbers.split()
            return int(fields[0]), int(fields[8])
    raise AssertionError("this process is on no host of `Hosts`")


def _prediction(case: Case, options: Options) -> str:
    hosts, ranks = len(options.hosts), sum(options.hosts)
    ours, flat = 2 * (hosts - 1) / hosts, 2 * (ranks - 1) / ranks
    return (
        f"A host sends and receives {ours:.2f} bytes a byte under the hierarchy, and {flat:.2f} in "
        "Gloo's ring, where its ranks are neighbours."
    )


BENCHMARK = Benchmark(
    "links",
    "all_reduce between hosts: network namespaces with cables of limited rates",
    CASES,
    measure,
    rounds=9,
    over_hosts=True,
)
