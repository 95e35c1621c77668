"""A rank is killed at a random moment: PeerLostError on all others, and soon, whatever they run."""

from __future__ import annotations

import os
import random
import signal
import threading
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from gradwire import collectives
from gradwire.ddp import DistributedDataParallel
from gradwire.errors import PeerLostError
from gradwire.local_sgd import LocalSGD
from gradwire.testing import run_ranks

SOON_S = 30.0  # less than the group's timeout
RANKS = 3


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Linear(8, 2))


def inputs():
    return torch.randn(4, 4)


def once(net):
    net(inputs()).sum().backward()


def accumulated(net):
    with net.no_sync():
        once(net)
    once(net)


def evaluated(net):
    once(net)
    with torch.no_grad():
        net(inputs())


def uneven(net):
    with net.join():
        for _ in range(1 + dist.get_rank()):
            once(net)


def ddp(step, hook=None, **options):
    net = DistributedDataParallel(model(), bucket_cap_mb=1e-4, **options)
    net.register_comm_hook(None, hook)
    return partial(step, net)


def local_sgd(hook=None):
    module = model()
    sgd = torch.optim.SGD(module.parameters(), lr=1e-3)
    optimizer = LocalSGD(sgd, module.named_parameters(), every=2, fragments=2, hook=hook)

    def step():
        optimizer.zero_grad()
        module(inputs()).sum().backward()
        optimizer.step()

    return step


def differentiable():
    x = torch.ones(RANKS * 10, requires_grad=True)

    def step():
        y = collectives.all_reduce(x) + collectives.broadcast(x, 0)
        torch.stack(list(collectives.all_gather(y))).sum().backward()
        collectives.reduce_scatter(y.detach())

    return step


PROGRAMS = {
    "plain": partial(ddp, accumulated),
    "unused": partial(ddp, once, find_unused_parameters=True),
    "evaluation": partial(ddp, evaluated),
    "uneven": partial(ddp, uneven),
    "all_reduce": partial(ddp, once, "all_reduce"),
    "int8": partial(ddp, once, "int8"),
    "local_sgd": local_sgd,
    "local_sgd, int4": partial(local_sgd, "int4"),
    "differentiable": differentiable,
}


def train(name, seed, ends):
    draw = random.Random(seed)
    victim, seconds = draw.randrange(RANKS), 0.03 * draw.random()
    step = PROGRAMS[name]()
    for _ in range(2):  # buckets are as they stay
        step()
    dist.barrier()
    if dist.get_rank() == victim:
        threading.Timer(seconds, os.kill, [os.getpid(), signal.SIGKILL]).start()
    try:
        while True:
            step()
    except Exception as error:
        (ends / f"{dist.get_rank()}").write_text(f"{type(error).__name__}: {error}")
    os._exit(1)  # as a script does, whose process ends with the error


def assert_others_learn(name, seed, backend, path):
    everyone, ends = range(RANKS), path / f"seed {seed}"
    ends.mkdir()
    args = [name, seed, ends]
    run_ranks(train, RANKS, backend=backend, may_die=everyone, timeout=SOON_S, args=args)
    victim = random.Random(seed).randrange(RANKS)
    for rank in set(everyone) - {victim}:
        told = (ends / f"{rank}").read_text()
        assert told.startswith(PeerLostError.__name__), told


@pytest.mark.narrow({"backend": "gloo"})
@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_a_death_at_a_random_moment(backend, tmp_path):
    assert_others_learn("all_reduce", 1, backend, tmp_path)


@pytest.mark.wide
@pytest.mark.timeout(180)
@pytest.mark.parametrize("backend", ["gloo", "shm"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_deaths_at_random_moments(name, backend, tmp_path):
    for seed in range(8 if os.environ.get("GRADWIRE_LONG") == "1" else 1):
        assert_others_learn(name, seed, backend, tmp_path)
