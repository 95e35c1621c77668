"""Models that fail in backward, and the reference for parameters that are not used."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from gradwire.ddp import naive


def mlp(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))


class Trap(torch.autograd.Function):
    """Raises in backward."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ArithmeticError("trap")


def average_used(net):
    """What find_unused_parameters has to do: a mean over ranks of what any of them used."""
    for p in net.parameters():
        used = torch.tensor(0.0 if p.grad is None else 1.0)
        dist.all_reduce(used)
        if used:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            naive.average_gradients(dist.group.WORLD, [p])


def assert_same(net, twin):
    for (n, p), q in zip(net.module.named_parameters(), twin.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), n
        if q.grad is not None:
            torch.testing.assert_close(p.grad, q.grad, msg=n)
