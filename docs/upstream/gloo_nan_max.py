"""Gloo: whether a NaN survives a maximum depends on its place."""

import datetime
import os
import tempfile

import torch
import torch.distributed as dist
from torch import multiprocessing as mp

WORLD = 3
EXPECTED = ["all nan"] * 3  # as torch.max


def run(rank):
    x = torch.full((6,), float("nan") if rank == 1 else float(rank))
    dist.all_reduce(x, dist.ReduceOp.MAX)
    return "all nan" if x.isnan().all() else x.tolist()


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
