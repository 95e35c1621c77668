"""Programs of the benchmark `sites`: a member of an elastic run, and a replica of torchft's DiLoCo.

Both train the same model on the same passages with the same inner and outer optimizers. An inner
step takes a fixed time, the rest of which the process sleeps: it stands for an accelerator, which
leaves the host's cores idle. Each outer step adds a line of JSON to a log.

`python -m benchmarks.sites_members JSON` is the supervisor of a site: it imports everything once,
forks the member, and forks another one when it dies.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.language import corpus
from gradwire import elastic
from gradwire._processes import end_with_parent

__all__ = ["INNER_SECONDS", "Site", "ddp_loss", "make_data", "network"]

PASSAGES, LENGTH, BATCH = 1 << 19, 8, 32
INNER_SECONDS = 0.05
"""Time of an inner step, most of which is sleep."""
DDP_RATES = {2: 1.5, 3: 2.0}
"""Learning rate at the beginning, by the number of sites: the best of 0.7, 1, 1.5 and 2."""
SILENCE = 0.5
"""Seconds without a sign of life after which a member counts as lost."""


@dataclass(frozen=True)
class Site:
    """Settings of the processes of one site.

    Args:
        kind: "gradwire" or "torchft".
        number: Number of the site.
        sites: Number of sites.
        address: Address of this site.
        store: host:port of the store, or of torchft's Lighthouse.
        inner: Inner steps of a shard in an outer step.
        shards: Shards of an outer step, over all sites.
        steps: Outer steps of the run.
        learning: Learning rate at the beginning, and the momentum of the outer optimizer.
        data: File with the passages.
        log: File to which the processes of all sites append.
    """

    kind: str
    number: int
    sites: int
    address: str
    store: str
    inner: int
    shards: int
    steps: int
    learning: Sequence[float]
    data: str
    log: str

    def note(self, event: str, **values: Any) -> None:
        """Append an event to the log."""
        known = {"event": event, "site": self.number, "pid": os.getpid()}
        line = json.dumps({**known, "time": time.monotonic(), **values}) + "\n"
        with Path(self.log).open("a", encoding="utf-8") as file:
            file.write(line)  # at once: lines stay whole


# --- the task ---


def make_data(path: Path) -> None:
    """Write passages to train on, and others for the loss: characters and the one after them."""
    text = corpus()
    train = text.batch(torch.Generator().manual_seed(0), PASSAGES, LENGTH)
    torch.save([part.to(torch.uint8) for part in (train, text.held_out(8192, LENGTH))], path)


def network(seed: int = 0) -> nn.Sequential:
    """Return a network of 10,400 parameters that predicts a character from 8 before it."""
    torch.manual_seed(seed)
    embedding, hidden = nn.Embedding(128, 16), nn.Linear(LENGTH * 16, 32)
    return nn.Sequential(embedding, nn.Flatten(), hidden, nn.Tanh(), nn.Linear(32, 128))


def loss_of(net: nn.Module, batch: Tensor) -> Tensor:
    """Return the mean loss in nats."""
    numbers = batch.long()
    return nn.functional.cross_entropy(net(numbers[:, :-1]), numbers[:, -1])


def inner_optimizer(parameters: Any, rate: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=rate)


def outer_optimizer(parameters: Any, momentum: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1.0, momentum=momentum, nesterov=True)


def train_batch(net: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> None:
    optimizer.zero_grad()
    loss_of(net, batch).backward()
    optimizer.step()


def ddp_loss(path: Path, seed: int, sites: int, samples: int) -> float:
    """Return the loss of plain data-parallel training: the mean over all sites in each step."""
    rate = DDP_RATES[sites]
    torch.set_num_threads(1)
    data, held_out = torch.load(path)
    net, batch = network(seed), sites * BATCH
    order = elastic.Samples(PASSAGES, batch=batch, shards=1, seed=seed)
    steps = samples // batch
    for step in range(steps):
        optimizer = inner_optimizer(net.parameters(), rate * (1 - step / steps))
        train_batch(net, optimizer, data[order.ids(step, elastic.Shard(0, 1))])
    return loss_of(net, held_out).item()


@contextlib.contextmanager
def paced() -> Iterator[None]:
    """Sleep after the block until an inner step's time has passed."""
    began = time.monotonic()
    yield
    time.sleep(max(0.0, began + INNER_SECONDS - time.monotonic()))


# --- members ---


def member(site: Site, data: Tensor, held_out: Tensor) -> None:
    """Train as a member of an elastic run."""
    run = elastic.join(
        backend="gloo",
        shards=site.shards,
        silence=timedelta(seconds=SILENCE),
        timeout=timedelta(seconds=60),
    )
    net = network()
    rate, momentum = site.learning
    outer = outer_optimizer(net.parameters(), momentum)
    run.keep(model=net, outer=outer)
    size = site.inner * BATCH
    for step in run.steps(site.steps, samples=PASSAGES, batch=site.shards * size):
        began = time.monotonic()
        make = partial(inner_optimizer, rate=rate * (1 - step.number / site.steps))
        with step:
            for shard in step.shards:
                ids = step.sample_ids(shard)
                with step.local(make) as inner:
                    for first in range(0, size, BATCH):
                        with paced():
                            train_batch(net, inner, data[ids[first : first + BATCH]])
            computed = time.monotonic()
            step.reduce()
            shards = [shard.first for shard in run._steps.dealt]
            site.note("reduced", step=step.number, generation=run.generation, shards=shards)
            step.commit(outer)
            site.note(
                "committed",
                step=step.number,
                size=run.size,
                began=began,
                computed=computed,
                samples=(step.number + 1) * site.shards * size,
            )
    site.note("end", loss=loss_of(net, held_out).item(), digest=_digest(net))


def _digest(net: nn.Module) -> str:
    data = b"".join(p.detach().numpy().tobytes() for p in net.parameters())
    return hashlib.sha256(data).hexdigest()[:16]


def replica(site: Site, data: Tensor, held_out: Tensor) -> None:
    """Train as a replica of torchft, whose Lighthouse is at the site's store."""
    socket.gethostname = lambda: site.address  # by which other replicas fetch the state
    from torchft import Manager, ProcessGroupGloo
    from torchft.local_sgd import DiLoCo

    net = network()
    rate, momentum = site.learning
    inner = inner_optimizer(net.parameters(), rate)
    outer = outer_optimizer(net.parameters(), momentum)

    def load(state: dict[str, Any]) -> None:
        net.load_state_dict(state["model"])
        inner.load_state_dict(state["inner"])

    store = dist.TCPStore(site.address, 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=1)),
        load_state_dict=load,
        state_dict=lambda: {"model": net.state_dict(), "inner": inner.state_dict()},
        min_replica_size=1,
        use_async_quorum=False,
        timeout=timedelta(seconds=5),
        rank=0,
        world_size=1,
        store_addr=site.address,
        store_port=store.port,
        hostname=site.address,
        lighthouse_addr=f"http://{site.store}",
        replica_id=f"site_{site.number}",
    )
    shards = site.shards // site.sites  # of a site in an outer step
    every, target = site.inner * shards, site.steps * site.sites
    order = torch.Generator().manual_seed(os.getpid())  # torchft leaves it to the user
    with DiLoCo(manager, [net], inner, outer, sync_every=every, use_bucketization=True):
        while (before := manager.batches_committed()) < target:
            began = time.monotonic()
            inner.param_groups[0]["lr"] = rate * (1 - before / target)
            for number in range(every):
                ids = torch.randint(PASSAGES, (BATCH,), generator=order)
                if number < every - 1:
                    with paced():
                        train_batch(net, inner, data[ids])
                    continue
                with paced():  # the last one exchanges: what it computes and sleeps comes before
                    inner.zero_grad()
                    loss_of(net, data[ids]).backward()
                computed = time.monotonic()
                inner.step()
            committed = manager.batches_committed()
            site.note(
                "committed" if committed > before else "dropped",
                step=manager.current_step(),
                size=manager.num_participants(),
                began=began,
                computed=computed,
                samples=committed * every * BATCH,
            )
    site.note("end", loss=loss_of(net, held_out).item(), digest=_digest(net))


# --- a site ---


def supervise(site: Site) -> None:
    """Fork a member, and another one whenever it dies."""
    torch.set_num_threads(1)
    os.environ["GRADWIRE_ELASTIC_STORE"] = site.store
    os.environ["GRADWIRE_ELASTIC_MEMBERS"] = str(site.sites)
    os.environ["GRADWIRE_ELASTIC_LAUNCH"] = site.log
    tensors = torch.load(site.data)
    work: Callable[[Site, Tensor, Tensor], None] = replica if site.kind == "torchft" else member
    if site.kind == "torchft":
        import torchft.local_sgd  # noqa: F401 - before the fork
    while True:
        pid = os.fork()
        if not pid:
            end_with_parent()
            site.note("start")
            work(site, *tensors)
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if code == 0:
            return
        site.note("death", code=code)


if __name__ == "__main__":
    supervise(Site(**json.loads(sys.argv[1])))
