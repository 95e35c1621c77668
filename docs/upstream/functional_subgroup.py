"""torch.distributed.nn.functional: gather, scatter and the gradient of all_gather fail in a
subgroup.
"""

import datetime
import os
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as functional
from torch import multiprocessing as mp

WORLD = 3
EXPECTED = [[], ["works"] * 3, ["works"] * 3]


def run(rank):
    group = dist.new_group([1, 2])
    calls = {
        "gather": lambda x: torch.stack(list(functional.gather(x, 1, group))),
        "scatter": lambda x: functional.scatter([x, 2 * x], 1, group),
        "all_gather": lambda x: torch.stack(list(functional.all_gather(x, group))),
    }
    seen = []
    for call in calls.values() if rank else ():
        x = torch.ones(1, requires_grad=True)
        try:
            call(x).sum().backward()
            seen.append("works")
        except (RuntimeError, ValueError) as error:
            seen.append(type(error).__name__)
    return seen


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
