"""A member of the long run: it trains until the store has a step to stop at."""

from __future__ import annotations

import hashlib
import os
import time
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from elastic.worker import BATCH, OPTIMIZERS, SAMPLES, Net
from gradwire import elastic
from gradwire.ddp import DistributedDataParallel

EVERY = 200
"""Steps from one comparison of weights to the next."""
STOP = "stop"
"""The store's key for the step after which all stop: a multiple of EVERY."""


class Digest(NamedTuple):
    """The weights of a member after so many steps."""

    member: int
    steps: int
    digest: str


def member(
    port: int, number: int, members: int, backend: str, pause: float, kind: str, pipe: Any
) -> None:
    """Train until the store has a step to stop at; send a digest after every so many steps."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    run = elastic.join(
        store, members=members, backend=backend, silence=timedelta(seconds=10), seed=1
    )
    torch.manual_seed(0)
    model = DistributedDataParallel(Net(kind), process_group=run.group)
    weights = [p for name, p in model.named_parameters() if "ledger" not in name]
    optimizer = OPTIMIZERS[kind](weights)
    run.keep(model=model, optimizer=optimizer)
    x = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(1))
    y = torch.arange(SAMPLES) % 4
    stop = 1 << 30
    for step in run.steps(1 << 30, samples=SAMPLES, batch=BATCH):
        if step.number % EVERY == 0 and step.number:
            pipe.send(Digest(number, step.number, _digest(model)))
            if store.check([STOP]):
                stop = int(store.get(STOP))
        if step.number == stop:
            break
        with step:
            for shard in step.shards:
                ids = step.sample_ids(shard)
                out, _ = model(x[ids], ids)
                step.backward(nn.functional.cross_entropy(out, y[ids]))
            time.sleep(pause)
            step.commit(optimizer)
    os._exit(0)


def _digest(model: nn.Module) -> str:
    values = [t.detach().contiguous() for t in model.state_dict().values() if t.dim()]
    data = b"".join(t.view(torch.uint8).numpy().tobytes() for t in values)
    return hashlib.sha256(data).hexdigest()[:16]
