"""Ranks that share one device, a network, and the mean of its gradients over ranks."""

from __future__ import annotations

import copy
import os

import torch
import torch.distributed as dist
from torch import nn

from gradwire.ddp.buckets import packed
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


def _on_device(fn, args):
    if ON_GPU:
        torch.cuda.set_device(0)
    packed.MOVE_BYTES = 32 << 10  # the networks are small
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


def batch(number=0, rows=4):
    generator = torch.Generator().manual_seed(100 * number + dist.get_rank())
    return torch.randn(rows, 8, generator=generator).to(DEVICE)


def network(wide=256):
    return Net(wide).to(DEVICE)


def twin_of(net):
    return copy.deepcopy(net.module)


def average(module, *, tolerant=False):
    """Replace gradients by their mean over ranks, one at a time."""
    for p in module.parameters():
        used = torch.tensor(0.0 if p.grad is None else 1.0).to(DEVICE)
        dist.all_reduce(used)
        if not used.item():
            continue
        if p.grad is None:
            assert tolerant
            p.grad = torch.zeros_like(p)
        g = p.grad.to_dense().contiguous()
        dist.all_reduce(g)
        p.grad = g / dist.get_world_size()


def assert_same(net, twin, *, tolerance=EXACT):
    """Compare gradients with the twin's, and between ranks bit by bit."""
    for (name, p), q in zip(net.module.named_parameters(), twin.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if q.grad is None:
            continue
        got, want = p.grad.to_dense().cpu(), q.grad.cpu()
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


def backward(net, twin, number=0, *, tolerance=EXACT, tolerant=False, **forward):
    """Compare the gradients of a step with the mean of the twin's."""
    for module in (net, twin):
        module.zero_grad()
        module(batch(number), **forward).square().mean().backward()
    average(twin, tolerant=tolerant)
    assert_same(net, twin, tolerance=tolerance)


def train(net, twin, *, steps=4, tolerance=EXACT, tolerant=False, **forward):
    """Take steps with a wrapper and with its twin, and compare gradients after each."""
    for number in range(steps):
        backward(net, twin, number, tolerance=tolerance, tolerant=tolerant, **forward)
        with torch.no_grad():
            for p, q in zip(net.parameters(), twin.parameters(), strict=True):
                if q.grad is not None:
                    q -= 0.01 * q.grad
                    p.copy_(q)
