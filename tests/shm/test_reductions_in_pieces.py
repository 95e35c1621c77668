"""Reductions of large tensors, which run in pieces, in every dtype."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import gradwire.shm
from gradwire.shm import meeting, reduction
from gradwire.shm.regions import RINGS
from gradwire.shm.register import shm_backend_of
from gradwire.testing import run_ranks

BYTES = reduction._UNCUT_BYTES
OPS = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG, "max": dist.ReduceOp.MAX}


def values(rank, count, dtype):
    """Small integers: their sums are exact in each of the dtypes."""
    return ((torch.arange(count) * (rank + 3)) % 13 - 6).to(dtype)


def expected(world, count, dtype, op):
    stacked = torch.stack([values(rank, count, dtype).double() for rank in range(world)])
    found = stacked.amax(0) if op == "max" else stacked.sum(0)
    return (found / world if op == "avg" else found).to(dtype)


def reduce_all(count, dtype, op):
    rank, world = dist.get_rank(), dist.get_world_size()
    tensor = gradwire.shm.empty(count, dtype=dtype)
    tensor.copy_(values(rank, count, dtype))
    dist.all_reduce(tensor, OPS[op])
    assert torch.equal(tensor, expected(world, count, dtype, op))
    tensor.copy_(values(rank, count, dtype))
    dist.reduce(tensor, world - 1, OPS[op])
    if rank == world - 1:
        assert torch.equal(tensor, expected(world, count, dtype, op))
    else:
        assert torch.equal(tensor, values(rank, count, dtype))


def scatter_reduced(count, dtype, op):
    rank, world = dist.get_rank(), dist.get_world_size()
    source = gradwire.shm.empty(count * world, dtype=dtype)
    source.copy_(values(rank, count * world, dtype))
    out = torch.empty(count, dtype=dtype)
    dist.reduce_scatter_tensor(out, source, OPS[op])
    whole = expected(world, count * world, dtype, op)
    assert torch.equal(out, whole[rank * count :][:count])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int32])
@pytest.mark.parametrize("op", OPS)
def test_reductions_in_pieces(dtype, op):
    if op == "avg" and not dtype.is_floating_point:
        pytest.skip("integers are not averaged")
    share = BYTES // dtype.itemsize
    run_ranks(reduce_all, args=(2 * share + 333, dtype, op))
    run_ranks(scatter_reduced, args=(share + 333, dtype, op))


def test_only_long_shares_are_cut():
    whole = torch.arange(BYTES // 4)
    assert whole.nbytes == 2 * BYTES
    assert len(reduction._in_pieces([whole[: BYTES // 8]])) == 1
    pieces = reduction._in_pieces([whole, -whole])
    assert len(pieces) > 2
    for column, tensor in zip(zip(*pieces, strict=True), (whole, -whole), strict=True):
        assert torch.equal(torch.cat(column), tensor)


def reduce_through(number, count):
    """Reductions of ordinary tensors whose ranks all ask for one ring."""
    world, float32, chosen = dist.get_world_size(), torch.float32, meeting.ring_for
    meeting.ring_for = lambda *_, **__: number
    try:
        rank = dist.get_rank()
        tensor, whole = values(rank, count, float32), expected(world, count, float32, "sum")
        dist.all_reduce(tensor)
        assert torch.equal(tensor, whole)
        tensor.copy_(values(rank, count, float32))
        dist.reduce(tensor, world - 1)
        assert torch.equal(tensor, whole if rank == world - 1 else values(rank, count, float32))
        each = count // world
        out = torch.empty(each)
        dist.reduce_scatter_tensor(out, values(rank, each * world, float32))
        assert torch.equal(out, whole[rank * each :][:each])
    finally:
        meeting.ring_for = chosen
    return list(shm_backend_of(dist.group.WORLD).state._staging)


@pytest.mark.parametrize("number", range(len(RINGS)))
def test_reductions_pass_through_every_ring(number):
    """Which one the ranks ask for goes by the machine's cores; here it is used more than once."""
    ring = RINGS[number]
    count = ring.slots * ring.slot_bytes // 4 + 333
    for used in run_ranks(reduce_through, 3, backend="shm", args=(number, count)):
        assert used == [number]
