"""Gloo: ranks that pass tensors of different sizes are aborted, by SIGABRT; no exception is
raised.
"""

import os
import signal
import tempfile

import torch
import torch.distributed as dist
from torch import multiprocessing as mp


def run(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    try:
        dist.all_reduce(torch.ones(4 + 1000 * rank))
    except RuntimeError:
        pass
    os._exit(0)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        ranks = [mp.get_context("spawn").Process(target=run, args=(r, folder)) for r in range(2)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
    aborted = [r for r, rank in enumerate(ranks) if rank.exitcode == -signal.SIGABRT]
    print("torch   ", torch.__version__)
    print("expected RuntimeError on both ranks")
    print("seen     aborted ranks:", aborted)
    raise SystemExit(not aborted)
