"""DDP: with static_graph=True, a step that leaves out a parameter keeps local gradients,
silently.
"""

import datetime
import os
import tempfile

import torch
import torch.distributed as dist
from torch import multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

WORLD = 2
EXPECTED = ["1.5 or an error", "1.5 or an error"]  # the mean of 1 and 2


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)

    def forward(self, x, both):
        return self.a(x) + (self.b(x) if both else 0)


def run(rank):
    model = DistributedDataParallel(Net(), static_graph=True)
    try:
        for both in (True, True, False):
            model.zero_grad()
            model(torch.full((1, 1), 1.0 + rank), both).sum().backward()
    except RuntimeError:
        return EXPECTED[rank]
    seen = model.module.a.weight.grad.item()
    return EXPECTED[rank] if seen == 1.5 else seen


def start(rank, folder, queue):
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=WORLD,
        timeout=datetime.timedelta(seconds=15),
    )
    queue.put((rank, run(rank)))
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    queue = mp.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(start, (folder, queue), WORLD)
    seen = [value for _, value in sorted(queue.get() for _ in range(WORLD))]
    print("torch   ", torch.__version__)
    print("expected", EXPECTED)
    print("seen    ", seen)
    raise SystemExit(seen == EXPECTED)
