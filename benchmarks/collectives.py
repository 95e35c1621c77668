"""Collectives of one size each: on shm with ordinary tensors, on shm in the segment, on Gloo."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from benchmarks.alternate import OURS, alternate, repeated
from benchmarks.bare import bare_passes
from benchmarks.benchmark import Benchmark, size_text
from benchmarks.launch import launch
from benchmarks.options import Options
from benchmarks.progress import say
from benchmarks.results import CaseResult, Measure
from benchmarks.stats import scaled
from gradwire import shm

__all__ = ["BENCHMARK", "Case", "measure"]

GLOO = "Gloo"
INSIDE = "gradwire in the segment"
BARE, BARE_INSIDE = "bare passes", "bare passes in the segment"
KINDS = {
    "ordinary tensors": (OURS, BARE),
    "in the segment": (INSIDE, BARE_INSIDE),
}
"""For each measure which of ours it is of, and which bare passes it is compared with."""
SAMPLE_BYTES = 16 << 20
"""Short operations are repeated in a sample until they have moved about this much …"""
MOST_REPEATS = 50
"""… but not more often than this."""


@dataclass(frozen=True)
class Case:
    """An operation and the bytes of its larger tensor."""

    op: str
    nbytes: int

    @property
    def name(self) -> str:
        """Name of the case in tables."""
        return f"{self.op}, {size_text(self.nbytes)}"


SMALL = [4, 4 << 10]
LARGE = [1 << 20, 25 << 20]
CASES = [
    *(Case("all_reduce", n) for n in (*SMALL, 64 << 10, *LARGE, 100 << 20)),
    *(Case(op, n) for op in ("all_gather", "reduce_scatter", "broadcast") for n in LARGE),
    *(Case("all_to_all", n) for n in LARGE),
    *(Case("ping-pong", n) for n in (*SMALL, 100 << 10, *LARGE)),
]


def measure(cases: Sequence[Case], options: Options) -> list[CaseResult]:
    """Each case's times, taken in one launch."""
    return launch(_measure, cases, options.rounds, world_size=options.world_size, backend="gloo")


def _measure(cases: Sequence[Case], rounds: int) -> list[CaseResult]:
    ours = dist.new_group(backend="shm")
    theirs = dist.new_group(backend="gloo")
    return [_measure_case(case, rounds, ours, theirs) for case in cases]


def _measure_case(case: Case, rounds: int, ours: ProcessGroup, theirs: ProcessGroup) -> CaseResult:
    say(case.name)
    world_size = ours.size()
    count = max(1, case.nbytes // 4 // world_size) * world_size if case.nbytes > 4 else 1
    repeats = max(1, min(MOST_REPEATS, SAMPLE_BYTES // case.nbytes))
    steps, results = {}, {}
    for name, group in ((OURS, ours), (INSIDE, ours), (GLOO, theirs)):
        results[name], call = _checked_call(name, case.op, group, count)
        steps[name] = repeated(call, repeats)
    for name, result in results.items():
        if not torch.equal(result, results[GLOO]):
            raise AssertionError(f"{case.op} on {name} and on Gloo gave different values")
    bare = world_size == 2 and case.nbytes >= LARGE[0] and case.op != "ping-pong"
    if bare:
        for name, shared in ((BARE, False), (BARE_INSIDE, True)):
            steps[name] = repeated(bare_passes(case.op, count, inside=shared), repeats)
    seconds = alternate(steps, rounds)
    micro = scaled(seconds, 1e6 / repeats)
    measures = []
    for kind, (name, least) in KINDS.items():
        samples = {OURS: micro[name], GLOO: micro[GLOO]}
        measures.append(Measure.of(kind, "µs", samples | ({BARE: micro[least]} if bare else {})))
    return CaseResult(case.name, _prediction(case), rounds, measures)


def _checked_call(
    name: str, op: str, group: ProcessGroup, count: int
) -> tuple[Tensor, Callable[[], object]]:
    """A contender's call of an operation, and all that one call leaves in its tensors."""
    inside = name == INSIDE
    tensors = [
        shm.empty(n, dtype=torch.float32, group=group) if inside else torch.empty(n)
        for n in (count, max(1, count // group.size()), count)
    ]
    call: Callable[[], object] = partial(OPERATIONS[op], group, *tensors)
    return _checked(call, tensors), call


def _checked(call: Callable[[], object], tensors: Sequence[Tensor]) -> Tensor:
    """All that one call leaves in its tensors, from values that differ between ranks."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    for tensor in tensors:
        tensor.random_(0, 100, generator=generator)
    call()
    result = torch.cat(list(tensors))
    for tensor in tensors:
        tensor.zero_()  # repeated sums must not run out of range, where adding is slow
    return result


def _all_reduce(group: ProcessGroup, whole: Tensor, part: Tensor, other: Tensor) -> None:
    dist.all_reduce(whole, group=group)


def _all_gather(group: ProcessGroup, whole: Tensor, part: Tensor, other: Tensor) -> None:
    dist.all_gather(list(whole.chunk(group.size())), part, group=group)


def _reduce_scatter(group: ProcessGroup, whole: Tensor, part: Tensor, other: Tensor) -> None:
    dist.reduce_scatter(part, list(whole.chunk(group.size())), group=group)


def _broadcast(group: ProcessGroup, whole: Tensor, part: Tensor, other: Tensor) -> None:
    dist.broadcast(whole, 0, group=group)


def _all_to_all(group: ProcessGroup, whole: Tensor, part: Tensor, other: Tensor) -> None:
    dist.all_to_all_single(other, whole, group=group)


def _ping_pong(group: ProcessGroup, whole: Tensor, part: Tensor, other: Tensor) -> None:
    """Exchange a message with the neighbour; with an odd number of ranks, the last is idle."""
    peer = group.rank() ^ 1
    if peer >= group.size():
        return
    if peer > group.rank():
        dist.send(whole, group=group, group_dst=peer)
        dist.recv(other, group=group, group_src=peer)
    else:
        dist.recv(other, group=group, group_src=peer)
        dist.send(whole, group=group, group_dst=peer)


Operation = Callable[[ProcessGroup, Tensor, Tensor, Tensor], None]
OPERATIONS: dict[str, Operation] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "broadcast": _broadcast,
    "all_to_all": _all_to_all,
    "ping-pong": _ping_pong,
}


def _prediction(case: Case) -> str:
    if case.op == "ping-pong":
        return (
            "Through a ring in shared memory, in pieces that one rank copies in while the other "
            "copies out, against Gloo's messages over TCP."
        )
    if case.nbytes <= 32 << 10:
        return "One wait and some thirty steps in Python, against Gloo's messages over TCP."
    return (
        "Ordinary tensors are copied into the segment and out of it, through the cache; in the "
        "segment nothing is copied that the operation itself does not move. Gloo copies through "
        "the kernel, twice."
    )


BENCHMARK = Benchmark(
    "collectives", "Collectives on shm and on Gloo, ranks of one host", CASES, measure, rounds=15
)
