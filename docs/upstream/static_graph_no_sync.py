"""DDP: static_graph=True with no_sync in the first iteration fails an internal assertion."""

import datetime
import os
import tempfile

import torch
import torch.distributed as dist
from torch import multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

WORLD = 2
EXPECTED = ["trains", "trains"]


def run(rank):
    model = DistributedDataParallel(nn.Linear(2, 1), static_graph=True)
    x = torch.ones(1, 2)
    try:
        with model.no_sync():  # as gradient accumulation does
            model(x).sum().backward()
        for _ in range(2):
            model(x).sum().backward()
    except RuntimeError as error:
        return str(error).partition(" at ")[0]
    return "trains"


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
