"""Marks of checked calls on shm: each belongs to one submission, and unmarked calls have none."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from ddp.common import on_ranks

from gradwire.collectives import all_reduce, broadcast
from gradwire.errors import MismatchError

SOON_S = 10.0


@pytest.mark.usefixtures("each_backend")
@on_ranks(2, timeout=30)
def test_a_backward_that_sends_nothing_leaves_no_mark():
    """One without communication on one rank, before the next operation."""
    x = torch.ones(2, requires_grad=True)
    y = all_reduce(x, invariant=True)
    if dist.get_rank() == 0:
        y.sum().backward()
    z = torch.ones(3)
    dist.all_reduce(z)
    dist.barrier()
    assert z.tolist() == [2.0] * 3


@pytest.mark.usefixtures("each_backend")
@on_ranks(2, timeout=30)
def test_a_marked_call_beside_torch_s_own_works():
    x = torch.ones(3) * (1 + dist.get_rank())
    if dist.get_rank() == 0:
        x = all_reduce(x)
    else:
        dist.all_reduce(x)
    assert x.tolist() == [3.0] * 3


@on_ranks(2, backend="shm", timeout=30)
def test_another_call_beside_a_marked_one_is_an_error_on_all():
    x = torch.ones(3, requires_grad=True)
    y = all_reduce(x)
    for first, other in (
        (lambda: all_reduce(x), dist.barrier),
        (lambda: all_reduce(x), lambda: broadcast(x, 0)),
        (y.sum().backward, lambda: all_reduce(torch.ones(3))),
    ):
        started = time.monotonic()
        with pytest.raises(MismatchError, match="all_reduce"):
            (other if dist.get_rank() else first)()
        assert time.monotonic() - started < SOON_S
        z = torch.ones(3)
        dist.all_reduce(z)  # in step again
        assert z.tolist() == [2.0] * 3
