"""Each benchmark runs from end to end on tiny sizes."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from benchmarks import (
    all_collectives,
    broadcast,
    collectives,
    courses,
    ddp,
    devices,
    devices_gpu,
    differentiable,
    guard,
    hooks,
    links,
    loss,
    models,
    overhead,
    report,
    shapes,
    sites,
    transposed,
    uses,
)
from benchmarks.hosts import why_no_hosts
from benchmarks.options import OWN_WORLDS, Options
from benchmarks.report import conditions
from benchmarks.results import CaseResult, Measure, Result
from benchmarks.tables import RESULTS
from benchmarks.training import Case

from gradwire.testing import run_ranks

needs_hosts = pytest.mark.skipif(why_no_hosts() != "", reason=f"no hosts: {why_no_hosts()}")
OPTIONS = Options(rounds=2)
ON_SHM = Options(rounds=2, backend="shm")
TINY = Case("tiny", partial(models.linear_layers, layers=3, width=4), (2, 4), "any")


def check_figures(case: CaseResult) -> None:
    for measure in case.measures:
        for spread in measure.contenders.values():
            assert spread.lower <= spread.median <= spread.upper
        for estimate in measure.ratios.values():
            assert math.isfinite(estimate.value)


BROADCASTS = [
    broadcast.Case("small", partial(shapes._norm, 8), "any", times=2),
    broadcast.Case("with a large one", partial(shapes._linear, 512, 512), "any"),
]
CHOSEN = ["MLP, hook torch's fp16_compress_hook", "MLP, accumulation of 4", "sparse embedding"]
USES = [
    replace(TINY, name="three ranks", ranks=3, memory=False, starts=True),
    *(
        replace(case, model=TINY.model, batch=(4, 4))
        if case.name.startswith("MLP")
        else replace(case, batch=(4, 2))
        for case in uses.CASES
        if case.name in CHOSEN
    ),
]


def tensors() -> list[torch.Tensor]:
    return [torch.empty(8, 8), torch.empty(3), torch.empty(1 << 16)]


COPIES = [
    devices.Case("add", partial(devices._adding, 4, 1), "any"),
    devices.Case("add many", partial(devices._adding_many, 4, tensors), "any"),
    devices.Case("copy many", partial(devices._broadcasting, 2, tensors), "any"),
    devices.Case("copy nothing", partial(devices._broadcasting, 1, tensors), "any"),
]
SMALL = [case for case in differentiable.CASES if case.nbytes == 4 << 10][:3]
ONCE = Options(rounds=1)
MEASURED: dict[str, tuple[Any, Any, Options, list[str]]] = {
    # cases, how they are measured, options, and the first peers
    "broadcast": (BROADCASTS, broadcast.measure, OPTIONS, ["torch"]),
    "broadcast on shm": (BROADCASTS, broadcast.measure, ON_SHM, ["torch", "torch on Gloo"]),
    "collectives": (
        [collectives.Case(op, 1 << 20) for op in collectives.OPERATIONS],
        collectives.measure,
        OPTIONS,
        ["Gloo"],
    ),
    "ddp": ([TINY], ddp.measure, OPTIONS, ["torch"]),
    "ddp on shm": ([TINY], ddp.measure, ON_SHM, ["torch", "torch on Gloo"]),
    "uses": (USES, ddp.measure, replace(ONCE, world_size=OWN_WORLDS), ["torch"]),
    "differentiable": (SMALL, differentiable.measure, ONCE, []),
    "devices": (COPIES, devices.measure, replace(OPTIONS, world_size=1), ["torch"]),
}


@pytest.mark.wide
@pytest.mark.parametrize("name", MEASURED)
def test_from_end_to_end(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ddp, "MEMORY_LAUNCHES", 1)
    cases, measure, options, peers = MEASURED[name]
    results = measure(cases, options)
    assert [result.name for result in results] == [case.name for case in cases]
    for result in results:
        check_figures(result)
        assert list(result.measures[0].ratios)[: len(peers)] == peers
    assert conditions(Result.of("ddp", options, results))


def all_sizes(sizes: tuple[int, ...]) -> list[CaseResult]:
    all_collectives.SIZES = sizes
    ops = [*all_collectives.ALL, "barrier"]
    return all_collectives._measure([all_collectives.Case(3, True, op) for op in ops], 1)


@pytest.mark.wide
def test_all_collectives_from_end_to_end() -> None:
    (cases, *_) = run_ranks(all_sizes, 3, backend="gloo", args=((4, 64 << 10),), timeout=100)
    assert [len(case.measures) for case in cases] == [3] * len(all_collectives.ALL) + [1]
    for case in cases:
        check_figures(case)
    result = Result.of("collectives_all", OPTIONS, cases)
    assert "all_reduce, 3 ranks, pinned" in {case.name for case in result.cases}
    assert report.grid(result).header == ["ratio to Gloo", "3 ranks, pinned"]


@needs_hosts
@pytest.mark.wide
def test_links_from_end_to_end(tmp_path: Path) -> None:
    options = Options(rounds=2, backend="shm", world_size=4, hosts=[2, 2])
    cases = [links.Case("limited", 40_000, 1e9), links.Case("unlimited", 400_000, None, slower=9)]
    results = links.measure(cases, options)
    assert [case.rounds for case in results] == [3, 3]
    for case in results:
        check_figures(case)
        *_, passed = case.measures
        assert 100 < passed.contenders["gradwire"].median < passed.contenders["Gloo"].median
    assert [measure.unit for measure in results[0].measures][1] == "% of the link's limit"
    Result.of("links", options, results).write(tmp_path / "links.json")
    assert "2 + 2 ranks on 2 hosts" in conditions(Result.read(tmp_path / "links.json"))


@needs_hosts
@pytest.mark.wide
def test_loss_from_end_to_end() -> None:
    options = Options(rounds=2, backend="shm", world_size=3, hosts=[2, 1])
    int8 = "gradwire int8"
    task = courses.Task(layers=1, width=16, steps=16, limit=32, every=8, held_out=3, seeds=(0, 1))
    methods = ("torch", "torch post-local SGD", "gradwire", "gradwire fp16", int8)
    case = loss.Case("any", None, task=task, methods=methods, whole=["torch"])
    (case,) = loss.measure([case], options)
    check_figures(case)
    by_name = {measure.name: measure.contenders for measure in case.measures}
    steps = by_name["steps to the loss"]
    assert 8 < steps["torch"].median <= 16  # it reaches its own last loss
    assert steps["gradwire"].median == pytest.approx(steps["torch"].median, rel=0.01)
    final = by_name["loss after 16 steps"]
    assert final["gradwire"].median == pytest.approx(final["torch"].median, rel=1e-4)
    assert by_name["as fast as torch"]["torch"].median == 1
    assert by_name["time to the loss, run whole"].keys() == {"torch"}
    passed = by_name["bytes each way, host and step"]
    assert passed["gradwire fp16"].median < passed["gradwire"].median
    assert int8 in transposed.tables(Result.of("loss", options, [case, case]))


def test_the_guard_compares_with_what_is_committed(monkeypatch: pytest.MonkeyPatch) -> None:
    checks = [name for check in guard.CHECKS for name in check.names]
    assert len(checks) == 10
    for check in guard.CHECKS:
        committed = Result.read(RESULTS / f"{check.committed}.json")
        assert {*check.names} <= {case.name for case in committed.cases}
        assert {*check.names} <= {case.name for case in check.benchmark.cases}

    def twice_as_long(cases: list[Case], options: Options) -> list[CaseResult]:
        assert not any(case.memory for case in cases)
        samples = {"gradwire": [2.0] * 3, "torch": [1.0] * 3}
        return [CaseResult(c.name, "", 3, [Measure.of("step", "ms", samples)]) for c in cases]

    slow = replace(ddp.BENCHMARK, measure=twice_as_long)
    monkeypatch.setattr(ddp, "BENCHMARK", slow)
    (found,) = guard.guard([guard.Check(slow, "gloo", "ddp", ["MLP 6 x 1024"], 3)])
    assert found.worse
    assert str(found).startswith("WORSE  ddp: MLP 6 x 1024, step, of torch: 2.00 (2.00 to 2.00)")


def test_overhead_from_end_to_end() -> None:
    results = overhead.measure(overhead.CASES, Options(rounds=1, world_size=1))
    assert [case.name for case in results] == [op.name for op in differentiable.OPS]
    for case in results:
        (measure,) = case.measures
        times = {name: spread.median for name, spread in measure.contenders.items()}
        above = times.pop("gradwire, above raw"), times.pop("torch, above raw")
        assert above == (times["gradwire"] - times["raw"], times["torch"] - times["raw"])
    assert not dist.is_initialized()


@pytest.mark.wide
def test_hooks_from_end_to_end() -> None:
    chosen = [case for case in hooks.CASES if case.name in ("int8", "bf16")]
    cases = hooks.measure(chosen, Options(rounds=1), layers=1)
    assert [case.name for case in cases] == ["bf16", "int8"]
    for case in cases:
        time, sent = case.measures
        assert set(time.contenders) == {"gradwire", hooks.NO_HOOK, *hooks.PEERS}
        nbytes = sum(p.nbytes for p in models.mlp(1).parameters())
        assert sent.contenders["torch"].median == pytest.approx(nbytes / 1e6)  # 2 (W - 1) / W = 1
        assert sent.contenders["torch, fp16"].median == pytest.approx(nbytes / 2e6)
    int8 = cases[1].measures[1].contenders["gradwire"].median
    assert int8 == pytest.approx(nbytes / 1e6 * 260 / 1024, rel=0.01)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_the_gpu_benchmark_from_end_to_end() -> None:
    cases = [
        devices.Case("scatter", partial(devices_gpu._scattering, 1), "any"),
        devices.Case("gather", partial(devices_gpu._gathering, 1), "any"),
        devices.Case("add", partial(devices_gpu._adding, 3, 1), "any"),
    ]
    results = devices_gpu.measure(cases, Options(rounds=2, world_size=1))
    assert [list(c.measures[0].contenders) for c in results] == [["gradwire", "bare copy"]] * 3


@pytest.mark.wide
@pytest.mark.timeout(200)
@pytest.mark.skipif(why_no_hosts() != "", reason=f"no hosts: {why_no_hosts()}")
def test_two_sites_are_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sites, "SECONDS", 6.0)
    monkeypatch.setattr(sites, "BETWEEN_FAULTS", 2.0)
    monkeypatch.setattr(sites, "CUT_SECONDS", 1.0)
    monkeypatch.setattr(sites, "DDP_SEEDS", range(1))
    data = tmp_path / "data.pt"
    sites.make_data(data)
    case = replace(sites.CASES[0], name="tiny")
    measures = {m.name: m for m in sites.measure_case(data, case, [sites.OURS]).measures}
    assert 5 < measures["goodput"].contenders[sites.OURS].median < 130
    assert measures["faults"].contenders[sites.OURS].median >= 2
    assert {*measures["loss at the end"].contenders} == {sites.OURS, sites.DDP}
