"""Differentiable collectives, forward and backward: ours, torch's, and what both send."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.nn import functional as theirs

from benchmarks.alternate import OURS, alternate, repeated
from benchmarks.benchmark import Benchmark, size_text
from benchmarks.launch import launch
from benchmarks.options import Options
from benchmarks.progress import say
from benchmarks.results import CaseResult, Measure
from benchmarks.stats import ratio, scaled
from gradwire import collectives as ours

__all__ = ["BENCHMARK", "OPS", "RAW", "TORCH", "Call", "Case", "Op", "measure"]

TORCH, RAW, CHECKED, SHM = "torch", "raw", "gradwire, checked", "gradwire on shm"
SAMPLE_BYTES = 4 << 20
MOST_REPEATS = 30
"""Short operations are repeated in a sample, until they have moved so much, but so often only."""
SMALL, SMALL_ROUNDS = 1 << 20, 3
"""Up to that size, so many times the rounds."""

Call = Callable[[Tensor, ProcessGroup], Any]


@dataclass(frozen=True)
class Op:
    """A collective in three forms, each from this rank's tensor, whose dim 0 the ranks divide.

    Args:
        name: Name in tables.
        ours: gradwire's function.
        torch: The one of torch.distributed.nn.functional, brought to the same result.
        raw: The forward collective with torch.distributed alone.
        adjoint: The backward collective, applied to a tensor of the result's shape.
        expected: Additional work of PyTorch's function.
    """

    name: str
    ours: Call
    torch: Call
    raw: Call
    adjoint: Callable[[Any, ProcessGroup], Any]
    expected: str


@dataclass(frozen=True)
class Case:
    """An operation and the bytes of each rank's tensor."""

    op: Op
    nbytes: int

    @property
    def name(self) -> str:
        """Name of the case in tables."""
        return f"{self.op.name}, {size_text(self.nbytes)}"

    @property
    def repeats(self) -> int:
        """Calls in a sample."""
        return max(1, min(MOST_REPEATS, SAMPLE_BYTES // self.nbytes))

    def rounds(self, asked: int) -> int:
        """More of them where the time is spent on waking up, which varies most."""
        return asked * SMALL_ROUNDS if self.nbytes <= SMALL else asked


def _all_reduce(x: Tensor, group: ProcessGroup) -> Tensor:
    y = x.detach().clone()
    dist.all_reduce(y, group=group)
    return y


def _all_gather(x: Tensor, group: ProcessGroup) -> Tensor:
    whole = x.new_empty((group.size() * len(x), *x.shape[1:]))
    dist.all_gather_into_tensor(whole, x.detach(), group)
    return whole


def _all_gather_list(x: Tensor, group: ProcessGroup) -> list[Tensor]:
    parts = [torch.empty_like(x, requires_grad=False) for _ in range(group.size())]
    dist.all_gather(parts, x.detach(), group)
    return parts


def _reduce_scatter(x: Tensor, group: ProcessGroup) -> Tensor:
    part = x.new_empty((len(x) // group.size(), *x.shape[1:]))
    dist.reduce_scatter_tensor(part, x.detach(), group=group)
    return part


def _reduce_scatter_list(xs: Sequence[Tensor], group: ProcessGroup) -> Tensor:
    return _reduce_scatter(torch.cat(list(xs)), group)


def _all_to_all(x: Tensor, group: ProcessGroup) -> Tensor:
    y = torch.empty_like(x, requires_grad=False)
    dist.all_to_all_single(y, x.detach(), group=group)
    return y


def _broadcast(x: Tensor, group: ProcessGroup) -> Tensor:
    y = x.detach().clone()
    dist.broadcast(y, 0, group)
    return y


def _reduce(x: Tensor, group: ProcessGroup) -> Tensor:
    y = x.detach().clone()
    dist.reduce(y, 0, group=group)
    return y


def _gather(x: Tensor, group: ProcessGroup) -> Tensor:
    at_root = group.rank() == 0
    whole = x.new_zeros((group.size() * len(x), *x.shape[1:]))
    dist.gather(x.detach(), list(whole.chunk(group.size())) if at_root else None, 0, group)
    return whole


def _scatter(x: Tensor, group: ProcessGroup) -> Tensor:
    part = x.new_empty((len(x) // group.size(), *x.shape[1:]))
    parts = list(x.detach().chunk(group.size())) if group.rank() == 0 else None
    dist.scatter(part, parts, 0, group)
    return part


def _their_reduce_scatter(x: Tensor, group: ProcessGroup) -> Tensor:
    parts = x.chunk(group.size())
    result: Tensor = theirs.reduce_scatter(torch.empty_like(parts[0]), parts, group=group)
    return result


def _our_scatter(x: Tensor, group: ProcessGroup) -> Tensor:
    like = x.chunk(group.size())[group.rank()]
    result: Tensor = ours.scatter(x, 0, like=like, group=group)
    return result


OPS = [
    Op(
        "all_reduce",
        lambda x, g: ours.all_reduce(x, group=g),
        lambda x, g: theirs.all_reduce(x, group=g),
        _all_reduce,
        _all_reduce,
        "torch does the same.",
    ),
    Op(
        "all_gather",
        lambda x, g: ours.all_gather(x, group=g),
        lambda x, g: torch.cat(theirs.all_gather(x, g)),
        _all_gather,
        _reduce_scatter,
        "torch joins W tensors in forward, and in backward scatters W times, stacks and sums.",
    ),
    Op(
        "all_gather_list",
        lambda x, g: ours.all_gather_list(x, group=g),
        lambda x, g: theirs.all_gather(x, g),
        _all_gather_list,
        _reduce_scatter_list,
        "torch scatters W times in backward, stacks and sums.",
    ),
    Op(
        "reduce_scatter",
        lambda x, g: ours.reduce_scatter(x, group=g),
        _their_reduce_scatter,
        _reduce_scatter,
        _all_gather,
        "torch sends lists, and joins the gradient's W parts.",
    ),
    Op(
        "all_to_all",
        lambda x, g: ours.all_to_all(x, group=g),
        lambda x, g: theirs.all_to_all_single(torch.empty_like(x), x, group=g),
        _all_to_all,
        _all_to_all,
        "torch does the same.",
    ),
    Op(
        "broadcast",
        lambda x, g: ours.broadcast(x, 0, group=g),
        lambda x, g: theirs.broadcast(x, 0, g),
        _broadcast,
        _reduce,
        "torch copies the tensor on the receivers too.",
    ),
    Op(
        "reduce",
        lambda x, g: ours.reduce(x, 0, group=g),
        lambda x, g: theirs.reduce(x, 0, group=g),
        _reduce,
        _broadcast,
        "torch leaves partial sums where zeros belong, and copies what is overwritten.",
    ),
    Op(
        "gather",
        lambda x, g: ours.gather(x, 0, group=g),
        lambda x, g: torch.cat(theirs.gather(x, 0, g)),
        _gather,
        _scatter,
        "torch joins W tensors in forward.",
    ),
    Op(
        "scatter",
        _our_scatter,
        lambda x, g: theirs.scatter(list(x.chunk(g.size())), 0, g),
        _scatter,
        _gather,
        "torch joins the gradient's W parts.",
    ),
]
GATHERING = ("all_gather", "all_gather_list")
CASES = [
    Case(op, nbytes)
    for op in OPS
    for nbytes in (4 << 10, 64 << 10, 1 << 20, 8 << 20, 25 << 20)
    if op.name in GATHERING or nbytes in (4 << 10, 1 << 20, 25 << 20)
]


def measure(cases: Sequence[Case], options: Options) -> list[CaseResult]:
    """Each case's times, taken in one launch."""
    names = [case.name for case in cases]
    return launch(_measure, names, options.rounds, world_size=options.world_size, backend="gloo")


def _measure(names: Sequence[str], rounds: int) -> list[CaseResult]:
    warnings.simplefilter("ignore", FutureWarning)  # torch's functions are deprecated
    groups = {"gloo": dist.new_group(backend="gloo"), "shm": dist.new_group(backend="shm")}
    return [_measure_case(case, rounds, groups) for case in CASES if case.name in names]


def _measure_case(case: Case, rounds: int, groups: Mapping[str, ProcessGroup]) -> CaseResult:
    say(case.name)
    rows = case.nbytes // 256
    x = torch.randn(rows, 64, requires_grad=True)
    gloo, shm, op = groups["gloo"], groups["shm"], case.op
    calls: dict[str, Callable[[Tensor], Any]] = {
        OURS: lambda x: op.ours(x, gloo),
        CHECKED: lambda x: _checked(op.ours, x, gloo),
        SHM: lambda x: op.ours(x, shm),
        TORCH: lambda x: op.torch(x, gloo),
    }
    cotangent = _agree_on_results(calls, x)
    forward: dict[str, Callable[[], object]] = {n: partial(f, x) for n, f in calls.items()}
    forward[RAW] = partial(op.raw, x, gloo)
    both: dict[str, Callable[[], object]] = {
        n: partial(_forward_backward, f, x, cotangent) for n, f in calls.items()
    }
    both[RAW] = partial(_raw_both, op, x, cotangent, gloo)
    rounds = case.rounds(rounds)
    measures = [
        _timed("forward", forward, case.repeats, rounds),
        _timed("forward and backward", both, case.repeats, rounds),
    ]
    return CaseResult(case.name, _prediction(case), rounds, measures)


def _timed(
    name: str, steps: Mapping[str, Callable[[], object]], repeats: int, rounds: int
) -> Measure:
    seconds = alternate({n: repeated(step, repeats) for n, step in steps.items()}, rounds)
    micro = scaled(seconds, 1e6 / repeats)
    measure = Measure.of(name, "µs", micro, peers=(TORCH, RAW, CHECKED))
    from_shm = {f"{TORCH}, from shm": ratio(micro[SHM], micro[TORCH])}
    return replace(measure, ratios={**measure.ratios, **from_shm})


def _checked(call: Call, x: Tensor, group: ProcessGroup) -> Any:
    with ours.checks(True):
        return call(x, group)


def _forward_backward(call: Callable[[Tensor], Any], x: Tensor, cotangent: Any) -> Tensor:
    x.grad = None
    y = call(x)
    torch.autograd.backward(y, cotangent)
    assert x.grad is not None
    return x.grad


def _raw_both(op: Op, x: Tensor, cotangent: Any, group: ProcessGroup) -> None:
    op.raw(x, group)
    op.adjoint(cotangent, group)


def _agree_on_results(calls: Mapping[str, Callable[[Tensor], Any]], x: Tensor) -> Any:
    """Fails unless all give the same results and gradients; a cotangent for the result."""
    y = calls[OURS](x)
    if isinstance(y, Tensor):
        cotangent: Any = torch.randn_like(y)
    else:
        cotangent = [torch.randn_like(part) for part in y]
    right = _forward_backward(calls[OURS], x, cotangent)
    for name, call in calls.items():
        gradient = _forward_backward(call, x, cotangent)
        if not torch.allclose(gradient, right, atol=1e-5):
            raise AssertionError(f"{name}'s gradient is not {OURS}'s")
    return cotangent


def _prediction(case: Case) -> str:
    small = "Expected: a few µs in Python over the raw collective. " if case.repeats > 1 else ""
    return f"{small}Sends what the raw collective and its adjoint send; {case.op.expected}"


BENCHMARK = Benchmark(
    "differentiable",
    "Differentiable collectives on Gloo and on shm, and torch's on Gloo",
    CASES,
    measure,
    rounds=15,
)
