"""DDP: the powerSGD hook hangs, or is aborted, on Gloo when a model has several buckets."""

import datetime
import os
import tempfile
import threading

import torch
import torch.distributed as dist
from torch import multiprocessing as mp
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

WORLD = 2
EXPECTED = ["trains", "trains"]


def run(rank):
    net = nn.Sequential(*[nn.Linear(256, 256) for _ in range(6)])
    model = DistributedDataParallel(net, bucket_cap_mb=0.3)
    state = PowerSGDState(None, 2, start_powerSGD_iter=2, min_compression_rate=1)
    model.register_comm_hook(state, powerSGD_hook)
    done = []

    def train():
        try:
            for step in range(50):
                model(torch.randn(8, 256)).sum().backward()
                done.append(step)
        except RuntimeError as error:
            done.append(type(error).__name__)

    thread = threading.Thread(target=train, daemon=True)
    thread.start()
    thread.join(40)
    return "trains" if done[-1:] == [49] else f"hangs after {len(done)} of 50 steps"


def start(rank, folder, queue):
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=WORLD,
        timeout=datetime.timedelta(seconds=15),
    )
    queue.put((rank, run(rank)))
    os._exit(0)  # a barrier would hang as well


if __name__ == "__main__":
    queue = mp.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        try:
            mp.spawn(start, (folder, queue), WORLD)
            seen = [value for _, value in sorted(queue.get() for _ in range(WORLD))]
        except mp.ProcessExitedException as error:  # Gloo aborts where sizes differ
            seen = [str(error)]
    print("torch   ", torch.__version__)
    print("expected", EXPECTED)
    print("seen    ", seen)
    raise SystemExit(seen == EXPECTED)
