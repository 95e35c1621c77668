"""Training programs that are killed: a member of an elastic run, a worker of torchrun, of torchft.

Each writes a line for each step that it commits: the time, its process id, the step's number. All
train the same model on the same samples.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.elastic.models import BATCH, MEMBERS, data, model
from gradwire import elastic

__all__ = ["trainer"]


def trainer(kind: str, log: Path) -> None:
    """A member of an elastic run, or a worker of torchrun; writes the time of each commit."""
    torch.set_num_threads(1)
    with log.open("a", buffering=1) as file:

        def committed(number: int) -> None:
            file.write(f"{time.monotonic()} {os.getpid()} {number}\n")

        if kind == "torchrun":
            _torchrun_worker(log.with_suffix(".pt"), committed)
        elif kind == "torchft":
            _torchft_replica(committed)
        else:
            _member(kind, committed)


def _member(backend: str, committed: Callable[[int], None]) -> None:
    run = elastic.join(backend=backend)
    x, net = data(), model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    run.keep(model=net, optimizer=optimizer)
    for step in run.steps(1 << 30, samples=len(x), batch=BATCH):
        with step:
            for shard in step.shards:
                step.backward(net(x[step.sample_ids(shard)]).square().mean())
            step.commit(optimizer)
        committed(run.committed_steps)


def _torchrun_worker(checkpoint: Path, committed: Callable[[int], None]) -> None:
    dist.init_process_group("gloo")
    x, net = data(), model()
    done = 0
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        net.load_state_dict(state["model"])
        done = state["step"]
    wrapped = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    samples = elastic.Samples(len(x), batch=BATCH, shards=MEMBERS)
    while True:
        ids = samples.ids(done, elastic.Shard(dist.get_rank(), dist.get_rank() + 1))
        optimizer.zero_grad()
        wrapped(x[ids]).square().mean().backward()
        optimizer.step()
        done += 1
        if dist.get_rank() == 0:
            partial = checkpoint.with_suffix(".partial")
            torch.save({"model": net.state_dict(), "step": done}, partial)
            partial.rename(checkpoint)
        committed(done)


def _torchft_replica(committed: Callable[[int], None]) -> None:
    """A replica of one process; it depends on the Lighthouse that the environment names."""
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

    x, net = data(), model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)

    def load(state: dict[str, Any]) -> None:
        net.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
        load_state_dict=load,
        state_dict=lambda: {"model": net.state_dict(), "optimizer": optimizer.state_dict()},
        min_replica_size=1,
        timeout=timedelta(seconds=5),
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        hostname="127.0.0.1",
        replica_id=f"replica_{os.getpid()}",
    )
    wrapped, wrapper = DistributedDataParallel(manager, net), Optimizer(manager, optimizer)
    samples = elastic.Samples(len(x), batch=BATCH, shards=MEMBERS)
    first = os.getpid() % MEMBERS  # to ask for its rank would wait for the quorum
    half = elastic.Shard(first, first + 1)
    while True:
        wrapper.zero_grad()  # the next quorum begins
        done = manager.current_step()
        ids = samples.ids(done, half)
        wrapped(x[ids]).square().mean().backward()
        wrapper.step()
        if manager.current_step() > done:
            committed(manager.current_step())
