"""Exchanges that are applied some steps after they were sent (Streaming DiLoCo)."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from gradwire.errors import ArgumentError
from gradwire.local_sgd import LocalSGD, diloco
from gradwire.testing import run_ranks


def train_line(steps, rank, **options):
    """Fit a line to this rank's samples; return the loss over all samples."""
    torch.manual_seed(rank)
    x = torch.randn(64, 4)
    y = x @ torch.tensor([1.0, -2.0, 3.0, 0.5]) + 0.1 * torch.randn(64)
    net = nn.Linear(4, 1)
    optimizer = LocalSGD(torch.optim.SGD(net.parameters(), lr=0.05), net, every=4, **options)
    for _ in range(steps):
        optimizer.zero_grad()
        (net(x).squeeze(1) - y).square().mean().backward()
        optimizer.step()
    optimizer.synchronize()
    return (net(x).squeeze(1) - y).square().mean().item(), net.weight.tolist()


def converge():
    rank = dist.get_rank()
    blocking = train_line(200, rank)
    delayed = train_line(200, rank, delay=3, alpha=0.5, fragments=2)
    return blocking, delayed


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_delayed_exchanges_converge_as_blocking_ones(backend):
    found = run_ranks(converge, world_size=2, backend=backend)
    for blocking, delayed in found:
        assert delayed[0] < 1.1 * blocking[0] + 1e-3
    assert found[0][1][1] == found[1][1][1]  # after synchronize()


def apply_late():
    weight = nn.Parameter(torch.zeros(1))
    sgd = torch.optim.SGD([weight], lr=1.0)
    optimizer = LocalSGD(sgd, [("weight", weight)], every=2, delay=1, alpha=0.25)
    seen = []
    for _ in range(4):
        optimizer.zero_grad()
        (weight * -(1.0 + dist.get_rank())).sum().backward()
        optimizer.step()
        seen.append(weight.item())
    return seen


def test_an_exchange_is_mixed_in_after_the_delay():
    # sent after step 2: 2 and 4, so that the anchor is 3; mixed after step 3: 0.25 w + 0.75 * 3
    assert run_ranks(apply_late, world_size=2) == [[1, 2, 3, 4], [2, 4, 3.75, 5.75]]


def refuse():
    net = nn.Linear(2, 2)
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    for options, message in (
        ({"delay": 2}, "delay is 2 and alpha 0.0, with every 2"),
        ({"delay": -1}, "delay is -1"),
        ({"alpha": 1.0}, "alpha 1.0"),
        ({"delay": 1, "hook": "int8"}, "hook BlockQuantization, which sends several messages"),
        ({"delay": 1, "hook": lambda state, bucket: bucket.buffer()}, "which sends several"),
    ):
        with pytest.raises(ArgumentError, match=message):
            LocalSGD(sgd, net, every=2, **options)
    diloco(sgd, net, every=2, delay=1, alpha=0.5, hook="bf16")


def test_arguments_that_a_delay_excludes_are_refused():
    run_ranks(refuse, world_size=1)
