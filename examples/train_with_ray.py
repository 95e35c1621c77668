"""Ray actors as members of an elastic run: one is killed meanwhile, and Ray restarts it.

python examples/train_with_ray.py
"""

from __future__ import annotations

import hashlib
import os
import signal
import time

import ray
import torch
import torch.distributed as dist
from torch import nn

from gradwire import elastic

STEPS, BATCH = 60, 32


def train(store: dist.Store, members: int, pause: float = 0.0) -> str:
    """Train as one member, and return the digest of the parameters."""
    torch.set_num_threads(1)
    run = elastic.join(store, members=members)
    net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    with torch.no_grad():
        for number, parameter in enumerate(net.parameters()):
            generator = torch.Generator().manual_seed(number)
            parameter.uniform_(-0.3, 0.3, generator=generator)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    run.keep(model=net, optimizer=optimizer)

    x = torch.randn(256, 8, generator=torch.Generator().manual_seed(0))
    y = x.sin().sum(dim=1, keepdim=True)
    for step in run.steps(STEPS, samples=len(x), batch=BATCH):
        with step:
            for shard in step.shards:
                ids = step.sample_ids(shard)
                step.backward(nn.functional.mse_loss(net(x[ids]), y[ids]))
            if run.size < members:  # so that a restarted member takes part in this short run
                time.sleep(pause)
            step.commit(optimizer)
    data = b"".join(parameter.detach().numpy().tobytes() for parameter in net.parameters())
    return hashlib.sha256(data).hexdigest()


@ray.remote(max_restarts=-1, max_task_retries=-1, num_cpus=0, max_concurrency=2)
class Member:
    """Member that Ray restarts when its process dies, with its current call."""

    def pid(self) -> int:
        return os.getpid()

    def train(self, port: int, members: int) -> str:
        store = dist.TCPStore("127.0.0.1", port, is_master=False)  # of the driver
        return train(store, members, pause=0.5)


def main(members: int = 2) -> tuple[list[str], str]:
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    store = elastic.serve_store()  # in the driver, which is not a member
    try:
        actors = [Member.remote() for _ in range(members)]
        victim = ray.get(actors[0].pid.remote())
        running = [actor.train.remote(store.port, members) for actor in actors]
        while not store.check(["gradwire/elastic/run/decision/1"]):
            time.sleep(0.05)
        os.kill(victim, signal.SIGKILL)
        digests = ray.get(running, timeout=90)
    finally:
        ray.shutdown()
    return digests, train(dist.HashStore(), 1)


if __name__ == "__main__":
    digests, alone = main()
    print(f"members: {digests}\nalone:   {alone}")
    assert set(digests) == {alone}
