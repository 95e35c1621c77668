"""Memory that autograd, another parameter or the user still reads is not written to."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddp.common import on_ranks
from gradwire.ddp import DistributedDataParallel

pytestmark = pytest.mark.usefixtures("each_backend")
SIZES = [20, 2_000, 20_000, 1_200_000]  # 80 B, 8 KB, 80 KB, 4.8 MB: each travels in its own way


class Made(nn.Module):
    """Parameters of given shapes, and a function of them and of a number."""

    def __init__(self, function, **shapes):
        super().__init__()
        torch.manual_seed(0)
        self.function = function
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(torch.randn(shape)))

    def forward(self, x):
        return self.function(self, x)


def number(step=0):
    return 1.0 + dist.get_rank() + step


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("size", SIZES)
@on_ranks(2)
def test_a_referenced_gradient_gets_the_result(size, shared):
    """Unless its memory belongs to another tensor, too."""
    net, kept, others = nn.Linear(size, 1), [], []
    if shared:
        net.weight.register_hook(lambda g: others.append(g.detach()))
    node = net.weight.expand_as(net.weight).grad_fn.next_functions[0][0]
    node.register_hook(lambda *_: kept.append(net.weight.grad))
    wrapped = DistributedDataParallel(net)  # whose hook is called after that one
    for step in range(2):
        wrapped.zero_grad()
        wrapped(torch.full((1, size), number(step))).sum().backward()
        assert (kept.pop() is net.weight.grad) == (not shared)
        assert (net.weight.grad == (dist.get_world_size() + 1) / 2 + step).all()
        assert all((other == number(i)).all() for i, other in enumerate(others))


def queued(m, x):
    """A gradient waits for another branch: scaled in place, it would halve what comes before."""
    return ((m.a * x).tanh().unsqueeze(0) + m.b.unsqueeze(0)) * x


def stacked(m, x):
    return torch.stack([m.a, m.b]) * x


@pytest.mark.parametrize("function", [queued, stacked])
def test_gradients_that_are_queued_or_alias_each_other(function, same_as_one_process):
    """Of these sizes; the fuzzer's models have many more such cases."""

    def program(net, rank, step):
        for _ in range(2):  # adds to what is there
            net(torch.tensor(1.0 + rank + step)).square().sum().backward()

    for n in SIZES:
        same_as_one_process(program, model=lambda n=n: Made(function, a=n, b=n), steps=2)


class Nothing(torch.autograd.Function):
    """Uses a parameter, and gives it no gradient."""

    @staticmethod
    def forward(ctx, h, p):
        return h + p.sum() * 0

    @staticmethod
    def backward(ctx, g):
        return g, None


def test_a_function_that_gives_no_gradient_on_one_rank(same_as_one_process):
    """It counts as zeros."""

    def forward(m, given):
        x, rank = given
        return (m.a * x).sum() + m.b.sum() if rank == 0 else Nothing.apply(m.b.sum(), m.a)

    def program(net, rank, step):
        net((torch.tensor(1.0 + rank + step), rank)).square().backward()

    for n in SIZES:
        same_as_one_process(program, model=lambda n=n: Made(forward, a=n, b=3), steps=2)


@pytest.mark.narrow({"each_backend": "shm"})  # whose memory a child would share
@on_ranks(2)
def test_gradients_in_a_forked_process():
    """It may clear those that it inherited without clearing ours."""
    net = DistributedDataParallel(Made(lambda m, x: m.a * x, a=20_000))
    for _ in range(2):
        net.zero_grad()
        net(number()).sum().backward()
    if (child := os.fork()) == 0:
        net.module.a.grad.zero_()
        os._exit(0)
    os.waitpid(child, 0)
    assert net.module.a.grad.unique().tolist() == [1.5]
