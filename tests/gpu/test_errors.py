"""Errors and deaths of ranks whose gradients are on the device."""

from __future__ import annotations

import os
import signal

import pytest
import torch.distributed as dist
from ddp.common import Trap

from gpu.common import EXACT, WORLDS, batch, network, on_each, run, train
from gradwire.ddp import DistributedDataParallel
from gradwire.errors import PeerFailedError, PeerLostError


def take_steps(net, steps, *, wrong=False):
    for _ in range(steps):
        x = batch().requires_grad_()
        net(Trap.apply(x) if wrong else x).sum().backward()
        net.zero_grad()


@pytest.mark.parametrize("hook", [None, "bf16"])
@on_each([(2, "gloo")], timeout=50)
def test_an_error_on_one_rank_is_raised_on_all(hook):
    """Noticed long before Gloo's timeout; the next step works."""
    net = DistributedDataParallel(network(), bucket_cap_mb=0.01, broadcast_buffers=False)
    net.register_comm_hook(None, hook)
    tolerance = 2e-2 if hook else EXACT
    train(net, steps=2, tolerance=tolerance)
    wrong = dist.get_rank() == 1
    with pytest.raises(ArithmeticError if wrong else PeerFailedError):
        take_steps(net, 2, wrong=wrong)
    net.zero_grad()
    train(net, steps=2, tolerance=tolerance)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_dies_in_backward(ranks):
    def main():
        net = DistributedDataParallel(network(), broadcast_buffers=False)
        net(batch()).sum().backward()
        if dist.get_rank() == ranks - 1:
            net.module.head.weight.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
        with pytest.raises(PeerLostError):
            take_steps(net, 3)
        return True

    assert run(main, ranks, may_die=[ranks - 1], timeout=50) == [True] * (ranks - 1) + [None]


@on_each(WORLDS[:2])
def test_a_parameter_without_a_gradient():
    net = DistributedDataParallel(network(), broadcast_buffers=False)
    net(batch(), whole=False).sum().backward()
    with pytest.raises(Exception, match=r"optional\.weight"):
        net(batch())
    net.zero_grad()
    train(net, steps=2)
