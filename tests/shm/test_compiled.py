"""Compiled code on shm behaves as on Gloo, with and without graph breaks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from gradwire.testing import run_ranks


def run_all_reduce(x):
    dist.all_reduce(x)
    return x * 2


def run_async(x):
    work = dist.all_reduce(x, async_op=True)
    work.wait()
    return x * 2


def run_barrier(x):
    dist.barrier()
    return x * 2


def run_broadcast(x):
    dist.broadcast(x, 0)
    return x * 2


def run_reduce(x):
    dist.reduce(x, 0)
    return x * 2


def run_gather(x):
    pieces = [torch.empty_like(x) for _ in range(2)]
    dist.all_gather(pieces, x)
    return pieces[1] * 2


def run_send_and_receive(x):
    if dist.get_rank() == 0:
        dist.send(x, 1)
    else:
        dist.recv(x, 0)
    return x * 2


def all_compiled():
    for function in (
        run_all_reduce,
        run_async,
        run_barrier,
        run_broadcast,
        run_reduce,
        run_gather,
        run_send_and_receive,
    ):
        torch._dynamo.reset()
        own = torch.arange(6.0) + 10 * dist.get_rank()
        expected = function(own.clone())
        result = torch.compile(function, backend="eager")(own.clone())
        if function is run_reduce and dist.get_rank() == 1:
            continue  # what the others are left with is not said
        torch.testing.assert_close(result, expected, msg=function.__name__)


@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_functions_with_a_collective_inside(backend):
    run_ranks(all_compiled, backend=backend, timeout=100)
