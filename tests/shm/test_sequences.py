"""Long sequences of operations leave nothing behind, and a stopped rank is waited for.

With GRADWIRE_LONG=1 in the environment: 100,000 operations, some minutes.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import gradwire.shm
from gradwire.testing import run_ranks

LONG = os.environ.get("GRADWIRE_LONG") == "1"


def usage():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 2**20, len(os.listdir("/proc/self/fd")), threading.active_count()


def soak(rounds):
    """What memory (MiB), descriptors and threads grow by after a warm-up."""
    world = dist.get_world_size()
    x, y, whole = torch.ones(100), torch.ones(20_000), torch.ones(20_000 * world)
    inside = gradwire.shm.empty(20_000).fill_(1.0)
    before = None
    for i in range(rounds):
        if i == rounds // 5:
            before = usage()
        dist.all_reduce(x, dist.ReduceOp.MAX)
        dist.all_reduce(inside, dist.ReduceOp.MAX, async_op=True).wait()
        dist.broadcast(y, i % world)
        dist.all_gather_into_tensor(whole, y)
        dist.barrier()
        works = [dist.isend(x, (dist.get_rank() + 1) % world)]
        works.append(dist.irecv(torch.empty(100), (dist.get_rank() - 1) % world))
        for work in works:
            work.wait()
    return [now - then for now, then in zip(usage(), before, strict=True)]


@pytest.mark.timeout(1200)
def test_many_operations_leak_nothing():
    rounds = 100_000 // 7 if LONG else 700
    for memory, descriptors, threads in run_ranks(
        soak, 2, backend="shm", timeout=900, args=(rounds,)
    ):
        assert memory < 8
        assert descriptors == 0
        assert threads == 0


@pytest.mark.on_ranks(2)
def test_a_stopped_rank_is_waited_for_asleep():
    """Rank 1 is stopped for a while; a long timeout sits it out, and no core is busy meanwhile."""
    if dist.get_rank() == 1:
        waker = subprocess.Popen(["sh", "-c", f"sleep 1; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
        waker.wait()
    x = torch.ones(50_000)
    burnt = time.process_time()
    dist.all_reduce(x)
    assert dist.get_rank() == 1 or time.process_time() - burnt < 0.3
