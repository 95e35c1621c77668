"""Gathers of 1 MiB and more a rank, which go other ways on some backends: values and gradients."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from gradwire import collectives as C
from gradwire.testing import run_ranks

pytestmark = pytest.mark.usefixtures("each_backend")

ROWS, COLUMNS = 520, 512  # of float32: a little more than 1 MiB


def own(rank, dtype):
    return torch.full((ROWS, COLUMNS), rank + 1.0, dtype=dtype)


def gathered(async_op, dtype):
    """A cotangent of k + 1 for rank k's part of the result, on every rank, or the root."""
    rank, world, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    whole = torch.cat([own(r, dtype) for r in range(world)])

    def check(op, expected, gradient):
        x = own(rank, dtype).requires_grad_()
        y = op(x)
        y = y.wait() if async_op else y
        parts = y if isinstance(y, tuple) else (y,)
        assert torch.equal(torch.cat(parts), expected)
        torch.autograd.backward(parts, [part.detach().clone() for part in parts])
        assert torch.equal(x.grad, own(rank, dtype) * gradient)

    options = {"group": group, "async_op": async_op}
    sizes = [ROWS] * world
    check(lambda x: C.all_gather(x, **options), whole, world)
    check(lambda x: C.all_gather(x, sizes=sizes, **options), whole, world)
    check(lambda x: C.all_gather_list(x, **options), whole, world)
    root = world - 1
    expected = whole if rank == root else torch.zeros_like(whole)
    check(lambda x: C.gather(x, root, **options), expected, 1)
    wide = torch.cat([own(r, dtype) for r in range(world)], 1)
    check(lambda x: C.all_gather(x, 1, **options), wide, world)


@pytest.mark.narrow(
    {"world": 2, "async_op": False, "dtype": torch.complex64},
    {"world": 2, "async_op": True, "dtype": torch.float32},
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("world", [2, 3, 5])
def test_large_gathers(world, async_op, dtype):
    run_ranks(gathered, world, args=(async_op, dtype), timeout=60)
