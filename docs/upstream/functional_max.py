"""torch.distributed.nn.functional.all_reduce: gradients of MAX and PRODUCT are wrong."""

import datetime
import os
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as functional
from torch import multiprocessing as mp

WORLD = 2
EXPECTED = [[0.0, 6.0], [2.0, 4.0]]  # x is 2 and 3; both ranks' losses use the result


def run(rank):
    gradients = []
    for op in (dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT):
        x = torch.tensor(2.0 + rank, requires_grad=True)
        functional.all_reduce(x, op).backward()
        gradients.append(x.grad.item())
    return gradients


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
