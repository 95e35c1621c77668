"""op="avg": the average of any numbers that a dtype has, and its adjoint, without overflow."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ddp.common import on_ranks
from torch import Tensor

from gradwire import collectives as C
from gradwire.testing import run_ranks

pytestmark = pytest.mark.usefixtures("each_backend")

# In each dtype a number whose double overflows, and one whose half is inexact, or nearly 0.
NUMBERS = {
    torch.float16: (4e4, 6e-8),
    torch.bfloat16: (3e38, 1e-37),
    torch.float32: (3e38, 1e-37),
    torch.float64: (1.7e308, 1e-300),
    torch.complex64: (3e38, 1e-37),
}


OPS = {
    "all_reduce": lambda x: C.all_reduce(x, "avg"),
    "async": lambda x: C.all_reduce(x, "avg", async_op=True).wait(),
    "invariant": lambda x: C.all_reduce(x, "avg", invariant=True),
    "reduce": lambda x: C.reduce(x, 0, "avg"),
    "reduce_scatter": lambda x: C.reduce_scatter(x, "avg"),
    "uneven": lambda x: C.reduce_scatter(
        x, "avg", sizes=[len(x)] + [0] * (dist.get_world_size() - 1)
    ),
    "all_reduce_coalesced": lambda x: C.all_reduce_coalesced([x], "avg")[0],
    "reduce_scatter_coalesced": lambda x: C.reduce_scatter_coalesced([x], "avg")[0],
}


def averages() -> None:
    world = dist.get_world_size()
    for dtype, numbers in NUMBERS.items():
        for number in numbers:
            for name, op in OPS.items():
                x = torch.full((2 * world,), number, dtype=dtype, requires_grad=True)
                y: Tensor = op(x)
                at_root = dist.get_rank() == 0 or name != "reduce"
                torch.testing.assert_close(y, torch.full_like(y, number if at_root else 0))
                y.backward(torch.full_like(y, number))
                # The adjoint of all_reduce adds the cotangents, others only move them.
                adds = name in ("all_reduce", "async", "all_reduce_coalesced")
                want = x.detach() if adds else x.detach() / world
                torch.testing.assert_close(x.grad, want, msg=f"{name} of {number}, {dtype}")


@pytest.mark.parametrize("world", [2, 3])
def test_averages_overflow_only_where_the_average_does(world: int) -> None:
    run_ranks(averages, world)


@on_ranks(3)
def test_averages_are_rounded_once() -> None:
    """By a power of two before and the rest after: the digits are those of dividing the sum."""
    torch.manual_seed(0)
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        every = torch.randn(3, 1000).to(dtype)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        total = every[0].to(wide)
        for piece in every[1:]:
            total = total + piece.to(wide)
        result = C.reduce_scatter(torch.cat([every[dist.get_rank()]] * 3), "avg")
        torch.testing.assert_close(result, (total / 3).to(dtype), rtol=0, atol=0)
