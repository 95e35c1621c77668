"""Ranks that die or stay away: the others get an error of ours, in both passes."""

from __future__ import annotations

import os
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from ddp.common import on_ranks

from gradwire import collectives as C
from gradwire.errors import CollectiveTimeoutError, PeerLostError
from gradwire.testing import run_ranks

pytestmark = pytest.mark.usefixtures("each_backend")


def lost(call):
    if dist.get_rank() == 1:
        os._exit(0)
    with pytest.raises(PeerLostError):
        call()


def in_forward():
    C.all_reduce(torch.ones(2))
    lost(lambda: C.all_gather(torch.ones(2)))


def in_backward():
    y = C.all_gather(torch.ones(2, requires_grad=True))
    lost(lambda: y.sum().backward())


def in_wait():
    handle = C.all_reduce(torch.ones(2), async_op=True)
    handle.wait()
    lost(lambda: C.all_reduce(torch.ones(2), async_op=True).wait())


def checked():
    lost(lambda: C.all_reduce(torch.ones(2), check=True))


@pytest.mark.narrow(
    {"death": in_forward, "each_backend": "shm"}, {"death": in_backward, "each_backend": "gloo"}
)
@pytest.mark.parametrize("death", [in_forward, in_backward, in_wait, checked])
def test_a_rank_that_dies(death):
    run_ranks(death, may_die=[1])


@pytest.mark.wide
@on_ranks(2)
def test_a_rank_that_stays_away():
    group = dist.new_group(timeout=timedelta(seconds=1))
    C.all_reduce(torch.ones(1), group=group)
    if dist.get_rank() == 0:
        begun = time.monotonic()
        with pytest.raises(CollectiveTimeoutError):
            C.all_reduce(torch.ones(1), group=group)
        assert time.monotonic() - begun > 0.9
    dist.barrier()


def test_unequal_parts_of_all_to_all_are_resolved_with_checks_on():
    def main():
        rank = dist.get_rank()
        x = torch.full((2 + 2 * rank,), float(rank), requires_grad=True)
        y = C.all_to_all(x, check=True)
        (y * (rank + 1)).sum().backward()
        return y.tolist(), x.grad.tolist()

    assert run_ranks(main) == [([0, 1, 1], [1, 2]), ([0, 1, 1], [1, 1, 2, 2])]
