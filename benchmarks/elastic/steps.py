"""A step of an elastic run in which nobody is lost, beside plain DistributedDataParallel."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.alternate import alternate, repeated
from benchmarks.elastic.models import MEMBERS
from benchmarks.models import mlp, transformer
from benchmarks.stats import ratio, spread
from gradwire import DistributedDataParallel, elastic

__all__ = ["MODELS", "measure", "member"]

MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "mlp": (mlp, (1024,), 64),
    "transformer": (transformer, (64, 256), 8),
}
"""Constructor, shape of a sample, and number of samples per step over all members."""
SAMPLES = 256
BLOCK = 3  # steps of one contender before the next has its turn
PLAIN = "DistributedDataParallel"
TREES = {"reproducible=True, 2 shards": 2, "reproducible=True, 8 shards": 8}
MORE = 4
"""Factor of the number of rounds for contenders that are nearly equal, in a separate launch."""


def plain(group: dist.ProcessGroup, net: nn.Module, x: Tensor, batch: int) -> Iterator[None]:
    """DistributedDataParallel, each of whose ranks has its half of the batch."""
    wrapped = DistributedDataParallel(net, process_group=group)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.01)
    samples = elastic.Samples(len(x), batch=batch, shards=MEMBERS)
    half = elastic.Shard(group.rank(), group.rank() + 1)
    for step in range(1 << 30):
        ids = samples.ids(step, half)
        optimizer.zero_grad()
        wrapped(x[ids]).square().mean().backward()
        optimizer.step()
        yield


def elastic_steps(run: elastic.Run, net: nn.Module, x: Tensor, batch: int) -> Iterator[None]:
    """The same as a member of an elastic run, whose monitor works in its own turns only."""
    wrapped = DistributedDataParallel(net, process_group=run.group)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.01)
    run.keep(model=wrapped, optimizer=optimizer)
    for step in run.steps(1 << 30, samples=len(x), batch=batch):
        with step:
            for shard in step.shards:
                step.backward(wrapped(x[step.sample_ids(shard)]).square().mean())
            step.commit(optimizer)
        yield


@contextlib.contextmanager
def awake(run: elastic.Run) -> Iterator[None]:
    """Let the run's monitor work: asleep, as it costs time in the others' turns, it would not be
    this contender's."""
    monitor, membership = run._runtime.monitor, run._runtime.membership
    for owner, name in ((monitor, "_look"), (membership, "beat")):
        owner.__dict__.pop(name, None)
    yield
    asleep(run)


def asleep(run: elastic.Run) -> None:
    run._runtime.monitor._look = lambda: None  # type: ignore[method-assign]
    run._runtime.membership.beat = lambda count: None  # type: ignore[method-assign]


def member(
    port: int, rank: int, backend: str, name: str, rounds: int, *, trees: bool
) -> dict[str, list[float]]:
    """Seconds of a step of each contender, round by round, in turn."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group(backend, store=store, rank=rank, world_size=MEMBERS)
    assert dist.group.WORLD is not None
    build, shape, batch = MODELS[name]
    x = torch.randn(SAMPLES, *shape, generator=torch.Generator().manual_seed(0))

    def net() -> nn.Module:
        torch.manual_seed(0)
        return build()

    first = plain(dist.group.WORLD, net(), x, batch)
    contenders: dict[str, Callable[[], object]] = {PLAIN: partial(_several, first)}
    for label, shards in (TREES if trees else {"reproducible=False": 8}).items():
        run = elastic.join(
            store, members=MEMBERS, backend=backend, reproducible=trees, shards=shards, name=label
        )
        steps = elastic_steps(run, net(), x, batch)
        next(steps)
        asleep(run)
        contenders[label] = partial(_in_turn, run, steps)
    taken = alternate(contenders, rounds)
    return {label: [s / BLOCK for s in seconds] for label, seconds in taken.items()}


def _several(steps: Iterator[None]) -> None:
    repeated(lambda: next(steps), BLOCK)()


def _in_turn(run: elastic.Run, steps: Iterator[None]) -> None:
    with awake(run):
        _several(steps)


def measure(backend: str, name: str, rounds: int) -> dict[str, Any]:
    """Two launches: milliseconds of a step, and over the launch's DistributedDataParallel."""
    trees = _launch(backend, name, rounds, trees=True)
    return {**_launch(backend, name, MORE * rounds, trees=False), **{k: trees[k] for k in TREES}}


def _launch(backend: str, name: str, rounds: int, *, trees: bool) -> dict[str, Any]:
    store = elastic.serve_store()
    command = [sys.executable, "-m", "benchmarks.elastic", "_member", str(store.port)]
    rest = [backend, name, str(rounds), "trees" if trees else ""]
    processes = [
        subprocess.Popen([*command, str(rank), *rest], stdout=subprocess.PIPE)
        for rank in range(MEMBERS)
    ]
    output = processes[0].communicate(timeout=235)[0]
    for process in processes:
        process.wait(timeout=20)
    taken = json.loads(output.splitlines()[-1])
    return {
        label: {
            "ms": asdict(spread([1e3 * s for s in seconds])),
            "ratio": asdict(ratio(seconds, taken[PLAIN])),
        }
        for label, seconds in taken.items()
    }
