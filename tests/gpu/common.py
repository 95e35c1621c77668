"""Ranks that share one device, a network, and steps held against one process."""

from __future__ import annotations

import os
from functools import partial
from inspect import signature

import pytest
import torch
import torch.distributed as dist
from ddp.common import in_one_process
from torch import nn

from gradwire.testing import run_ranks

DEVICE = os.environ.get("GRADWIRE_TEST_DEVICE", "cpu")
ON_GPU = DEVICE != "cpu"
ONE = "nccl" if ON_GPU else "gloo"
"""Backend of a single rank."""
WORLDS = [(1, ONE), (2, "gloo"), (4, "gloo")][: 3 if ON_GPU else 2]
EXACT = 1e-4 if ON_GPU else 1e-5
"""Relative difference of two sums in another order; a GPU's kernels add in any order."""
HAS_MIXED_GROUPS = torch.__version__ >= "2.14"
"""True if "cpu:shm,cuda:nccl" is supported."""


def run(fn, ranks=2, backend="gloo", *, args=(), timeout=60.0, may_die=()):
    """Run a function on ranks that share the device; return the ranks' results."""
    if not ON_GPU:
        backend = "gloo" if "shm" not in backend else "shm"
    return run_ranks(
        _on_device, ranks, backend=backend, args=(fn, args), timeout=timeout, may_die=may_die
    )


def on_each(worlds, timeout=60.0):
    """Run a test on ranks that share the device, once for each number of ranks and backend."""

    def decorate(test):
        def main(ranks, backend, **given):
            run(partial(test, **given), ranks, backend, timeout=timeout)

        own = signature(test)
        worlds_first = [*signature(main).parameters.values()][:2]
        main.__signature__ = own.replace(parameters=[*worlds_first, *own.parameters.values()])
        main.__name__, main.__doc__ = test.__name__, test.__doc__
        main.pytestmark = getattr(test, "pytestmark", [])
        return pytest.mark.parametrize(("ranks", "backend"), worlds)(main)

    return decorate


def _on_device(fn, args):
    if ON_GPU:
        torch.cuda.set_device(0)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    return fn(*args)


class Net(nn.Module):
    """Parameters of several sizes and layouts, a shared weight, buffers and a part to leave out."""

    def __init__(self, wide=256):
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv1d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm1d(4)
        self.wide = nn.Linear(32, wide)
        self.first, self.second = nn.Linear(wide, wide, bias=False), nn.Linear(wide, wide)
        self.second.weight = self.first.weight
        self.optional = nn.Linear(wide, wide)
        self.head = nn.Linear(wide, 3)

    def forward(self, x, *, whole=True):
        h = self.norm(self.conv(x.unsqueeze(1))).flatten(1)
        h = torch.relu(self.wide(h))
        h = self.second(torch.tanh(self.first(h)))
        if whole:
            h = self.optional(h)
        return self.head(torch.tanh(h))


def batch(number=0, rank=None):
    rank = dist.get_rank() if rank is None else rank
    generator = torch.Generator().manual_seed(100 * number + rank)
    return torch.randn(4, 8, generator=generator).to(DEVICE)


def network(wide=256):
    return Net(wide).to(DEVICE)


def assert_same(net, expected, *, tolerance=EXACT):
    """Compare gradients with those of one process, and between ranks bit by bit."""
    for (name, p), want in zip(net.module.named_parameters(), expected, strict=True):
        assert (p.grad is None) == (want is None), name
        if want is None:
            continue
        got = p.grad.to_dense()
        scale = max(want.abs().max().item(), 1e-3)
        off = (got - want).abs().max().item()
        assert off <= tolerance * scale, f"{name}: off by {off:.3g} of {scale:.3g}"
        assert_same_bits(got, name)


def assert_same_bits(tensor, name=""):
    """Compare a tensor between ranks."""
    held = [None] * dist.get_world_size()
    own = tensor.detach().cpu().flatten().view(torch.uint8).numpy().tobytes()
    dist.all_gather_object(held, own)
    assert all(other == held[0] for other in held), f"{name} differs between ranks"


def plain(net, rank, number):
    net(batch(number, rank)).square().mean().backward()


def train(net, program=plain, *, steps=4, tolerance=EXACT):
    """Take steps, and compare the gradients of each with those of one process."""
    for number in range(steps):
        expected = in_one_process(program, net.module, number, dist.get_world_size())
        net.zero_grad()
        program(net, dist.get_rank(), number)
        assert_same(net, expected, tolerance=tolerance)
        with torch.no_grad():
            for p in net.parameters():
                if p.grad is not None:
                    p -= 0.01 * p.grad
