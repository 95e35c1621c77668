"""DDP: after an exception in one rank's backward, ranks average the gradients of different
steps, silently.
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
EXPECTED = ["an error", "an error"]


class Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, raises):
        ctx.raises = raises
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if ctx.raises:
            raise ValueError("here")
        return grad, None


def run(rank):
    model = DistributedDataParallel(nn.Linear(1, 1, bias=False))
    seen = []
    for step in range(4 if rank else 3):
        model.zero_grad()
        try:
            out = model(torch.full((1, 1), float(step)))
            Raises.apply(out, rank == 1 and step == 1).sum().backward()
        except ValueError:
            continue
        except RuntimeError:
            return "an error"
        seen.append(model.module.weight.grad.item())
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
