"""Ranks in different steps, and replicas that are no longer equal."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

from gradwire import hooks
from gradwire.ddp import DistributedDataParallel
from gradwire.errors import MismatchError
from gradwire.testing import run_ranks

pytestmark = pytest.mark.usefixtures("each_backend")


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def batch(step):
    return torch.full((2, 4), 1.0 + dist.get_rank() + 10 * step) / 20


def train(net, steps, *, skipped):
    """Leave the backward of one step out on rank 1, as for a loss that is NaN."""
    for step in range(steps):
        loss = net(batch(step)).square().mean()
        if dist.get_rank() == 1 and step == skipped:
            loss = loss * math.nan
        if not loss.isfinite():
            continue
        loss.backward()


OPTIONS = [{}, {"find_unused_parameters": True}, {"static_graph": True}]


@pytest.mark.parametrize("hook", [None, hooks.all_reduce])
@pytest.mark.parametrize("options", OPTIONS)
def test_a_rank_that_leaves_a_backward_out(options, hook):
    """Its next gradients are those of another step than the others'."""

    def main():
        net = DistributedDataParallel(mlp(), **options)
        net.register_comm_hook(None, hook)
        with pytest.raises(MismatchError, match=r"rank 0: 0; rank 1: 1; rank 2: 0\. Call backward"):
            train(net, 5, skipped=2)
        net.zero_grad()
        train(net, 2, skipped=None)  # the ranks go on together
        return net.module[0].weight.grad.tolist()

    first, *others = run_ranks(main, 3)
    assert all(other == first for other in others)


def logged(net, x):
    with torch.no_grad():
        net(x)
    with net.no_sync():
        net(x).sum()


def looked_at(net, x):
    net(x)


def between(net, x):
    loss = net(x).sum()
    net(x).sum()  # after the forward of the step, and before its backward
    loss.backward()


def in_two(net, x):
    (net(x).sum() + net(x * 2).sum()).backward()


def second_first(net, x):
    first, second = net(x), net(x * 2)
    (second.sum() + first.sum()).backward()


def for_the_input(net, x):
    x = x.clone().requires_grad_()
    torch.autograd.grad(net(x).sum(), x)


@pytest.mark.parametrize("extra", [logged, looked_at, between, in_two, second_first, for_the_input])
@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}])
def test_a_rank_that_runs_other_forwards(extra, options):
    """All of these are trained by PyTorch as they are meant."""

    def main():
        net = DistributedDataParallel(mlp(), **options)
        if dist.get_rank() == 1:
            net(batch(0))  # tried before training
        for step in range(4):
            complete = extra in (between, in_two, second_first)
            if dist.get_rank() == 1:
                extra(net, batch(step))
            if dist.get_rank() != 1 or not complete:
                net(batch(step)).sum().backward()
        return net.module[0].weight.grad.tolist()

    first, *others = run_ranks(main, 2)
    assert all(other == first for other in others)


def test_all_ranks_leave_a_backward_out():
    def main():
        net = DistributedDataParallel(mlp())
        for step in range(5):
            loss = net(batch(step)).sum()
            if step % 2 == 0:
                loss.backward()

    run_ranks(main, 2)
