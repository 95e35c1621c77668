"""Twelve typical accidents of rank 1 among three ranks.

    python accidents.py BACKEND DIRECTORY NAME...

PyTorch is imported once; each rank is a fork. The dumps of an accident are in DIRECTORY/NAME. Lines
that a verdict is to name are marked with the accident's name. On Gloo, slow_link is to run in a
network of its own: `unshare --map-root-user --net`.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from staging import Ranks, wait_for_announcements, wait_until

from gradwire import DistributedDataParallel, collectives

RANKS = 3
TIMEOUT = timedelta(seconds=2)


def skip(rank):
    for step in range(5):
        collectives.all_reduce(torch.ones(8))
        if rank == 1 and step == 3:
            continue
        collectives.all_gather(torch.ones(2))  # here: skip


def order(rank):
    calls = [
        lambda: collectives.broadcast(torch.ones(2), src=0),
        lambda: collectives.all_reduce(torch.ones(8)),  # here: order
    ]
    for call in calls if rank != 1 else reversed(calls):
        call()


def shape(rank):
    for step in range(4):
        batch = torch.ones(20 if rank == 1 and step == 3 else 8)
        collectives.all_reduce(batch)  # here: shape


def endless_loop(rank):
    def load_batch(step):
        while rank == 1 and step == 2:
            time.sleep(0.001)  # here: endless_loop
        return torch.ones(8)

    for step in range(4):
        collectives.all_reduce(load_batch(step))


def sigstop(rank):
    collectives.all_reduce(torch.ones(8))
    wait_for_announcements()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    collectives.all_reduce(torch.ones(8))


def sigkill(rank):
    collectives.all_reduce(torch.ones(8))
    wait_for_announcements()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    collectives.all_reduce(torch.ones(8))


def out_of_memory(rank):
    collectives.all_reduce(torch.ones(8))
    if rank == 1:
        torch.empty(1 << 50)  # here: out_of_memory
    collectives.all_reduce(torch.ones(8))


def swallowed(rank):
    def check(step):
        if rank == 1 and step == 2:
            raise ValueError("a bad sample")

    for step in range(4):
        try:
            check(step)
            collectives.all_reduce(torch.ones(8))  # here: swallowed
        except ValueError:
            pass
        collectives.all_gather(torch.ones(2))


class TwoParts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, x, both):
        return self.second(self.first(x)) if both else self.first(x)


def unused(rank):
    model = DistributedDataParallel(TwoParts())
    for step in range(3):
        model(torch.ones(1, 4), both=rank != 1 or step < 2).sum().backward()
        model.zero_grad()
    model(torch.ones(1, 4), both=True)  # raises the error of the previous backward pass


def deadlock(rank):
    groups = [dist.new_group(timeout=TIMEOUT) for _ in range(2)]
    for group in groups if rank != 1 else reversed(groups):
        collectives.all_reduce(torch.ones(8), group=group)  # here: deadlock


def slow_rank(rank):
    for _ in range(8):
        time.sleep(0.2 if rank == 1 else 0.01)
        collectives.all_reduce(torch.ones(8))  # here: slow_rank


def slow_link(rank):
    """Slow down messages to and from rank 1; each pair of ranks has a group."""
    pairs = [(0, 1), (0, 2), (1, 2)]
    groups = {pair: dist.new_group(pair, timeout=timedelta(seconds=30)) for pair in pairs}
    if rank == 1 and dist.get_backend() == "shm":
        slow_down_shared_memory()
    for _ in range(4):
        for pair, group in groups.items():
            dist.barrier()
            if rank in pair:
                collectives.all_reduce(torch.ones(1 << 19), group=group)  # here: slow_link


def leave_network(rank, directory):
    """Put rank 1 into a network that a slow link connects to the others' network."""
    if rank == 1:
        if ctypes.CDLL(None, use_errno=True).unshare(0x40000000) != 0:  # CLONE_NEWNET
            raise OSError(ctypes.get_errno(), "unshare")
        (directory / "alone").write_text(str(os.getpid()))
        wait_until((directory / "linked").exists)
    elif rank == 0:
        wait_until((directory / "alone").exists)
        pid = (directory / "alone").read_text()
        inside = f"nsenter --net --target {pid} --"
        for line in LINK.splitlines():
            subprocess.run(line.replace("INSIDE", inside).replace("PID", pid).split(), check=True)
        (directory / "linked").write_text("yes")
    wait_until((directory / "linked").exists)
    os.environ["GLOO_SOCKET_IFNAME"] = "link1" if rank == 1 else "link0"


LINK = """\
ip link set lo up
ip link add link0 type veth peer name link1 netns PID
ip addr add 10.77.0.1/24 dev link0
ip link set link0 up
tc qdisc add dev link0 root tbf rate 40mbit burst 64kb latency 200ms
INSIDE ip link set lo up
INSIDE ip addr add 10.77.0.2/24 dev link1
INSIDE ip link set link1 up
INSIDE tc qdisc add dev link1 root tbf rate 40mbit burst 64kb latency 200ms"""


def slow_down_shared_memory():
    """Slow down each shared-memory step of this rank, as on a starved core."""
    from gradwire.shm.memory.group_segment import Semaphores

    post = Semaphores.post

    def late(self, peers):
        time.sleep(0.03)
        post(self, peers)

    Semaphores.post = late


def stage(name, backend, directory):
    def before(rank):
        if name == "slow_link" and backend == "gloo":
            leave_network(rank, directory)

    # nothing fails on a slow link
    timeout = timedelta(seconds=60) if name == "slow_link" else TIMEOUT
    ranks = Ranks(globals()[name], directory, RANKS, backend, timeout, before)
    ranks.wait(lambda ranks: set(ranks.left) <= {1})  # rank 1 hangs or is stopped on purpose
    ranks.collect()
    ranks.kill()


if __name__ == "__main__":
    for each in sys.argv[3:]:
        stage(each, sys.argv[1], Path(sys.argv[2]) / each)
