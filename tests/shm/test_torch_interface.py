"""Other parts of torch's interface: sparse sums, monitored barriers, timeouts."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from gradwire.errors import ArgumentError, CollectiveTimeoutError, MismatchError
from gradwire.shm.regions import Ring
from gradwire.shm.register import shm_backend_of
from gradwire.testing import run_ranks

SECOND = timedelta(seconds=1)


def on_ranks(function, world=2, backend="shm", args=()):
    return run_ranks(function, world, backend=backend, timeout=60, args=args)


def entries(rank, dtype):
    """Rows 0 of all, one of its own twice, and of the last rank none."""
    if rank == dist.get_world_size() - 1 and rank:
        return torch.sparse_coo_tensor(
            torch.empty(1, 0, dtype=torch.int64), torch.empty(0, 3), (9, 3)
        ).to(dtype)
    indices = torch.tensor([[rank + 1, 0, rank + 1]])
    return torch.sparse_coo_tensor(indices, torch.arange(9).view(3, 3), (9, 3)).to(dtype)


def sparse_sums():
    rank, world = dist.get_rank(), dist.get_world_size()
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64):
        expected = sum(entries(r, dtype).to_dense() for r in range(world))
        for async_op in (False, True):
            x = entries(rank, dtype)
            work = dist.all_reduce(x, async_op=async_op)
            if async_op:
                work.wait()
            assert x.is_coalesced()
            assert x.dtype == dtype
            torch.testing.assert_close(x.to_dense(), expected, rtol=0, atol=0)
    wide = torch.eye(300).to_sparse()  # too much to travel with the header
    x = torch.sparse_coo_tensor(wide.indices(), torch.rand(300), (300, 300)).requires_grad_()
    dist.all_reduce(x)
    assert x.is_leaf


@pytest.mark.narrow({"world": [1, 2]})
@pytest.mark.parametrize("world", [1, 2, 3])
def test_sparse_tensors_are_summed(world):
    on_ranks(sparse_sums, world)


def sparse_mistakes():
    rank, messages = dist.get_rank(), []
    with pytest.raises(ArgumentError, match="support only SUM"):
        dist.all_reduce(torch.eye(3).to_sparse(), dist.ReduceOp.MAX)
    for mine in (
        torch.eye(3 + rank).to_sparse(),
        torch.eye(3) if rank else torch.eye(3).to_sparse(),
    ):
        with pytest.raises(MismatchError) as caught:
            dist.all_reduce(mine)
        messages.append(str(caught.value))
    x = torch.eye(3).to_sparse()
    dist.all_reduce(x)
    assert x.to_dense().equal(2 * torch.eye(3))
    return messages


def test_sparse_tensors_that_differ_are_an_error_on_all_ranks():
    first, second = on_ranks(sparse_mistakes)
    assert first == second


@pytest.mark.on_ranks(3)
def test_monitored_barrier_names_missing_ranks():
    group, rank = dist.group.WORLD, dist.get_rank()
    group.monitored_barrier(SECOND * 30)
    if rank == 0:
        with pytest.raises(CollectiveTimeoutError, match=r"monitored_barrier.*ranks \[1, 2\]"):
            group.monitored_barrier(SECOND, True)
        return
    while not _links(group).lost:  # this rank never calls
        time.sleep(0.02)


def _links(group):
    return shm_backend_of(group).state.links


@pytest.mark.on_ranks(2)
def test_one_tensor_in_place_of_a_list():
    x = torch.ones(2)
    dist.group.WORLD.allreduce(x).wait()  # as join() of torch's DDP calls it
    assert x.tolist() == [2.0, 2.0]


@pytest.mark.on_ranks(2)
def test_the_group_s_timeout_can_be_set():
    group = dist.group.WORLD
    group.set_timeout(SECOND)
    if dist.get_rank() == 0:
        with pytest.raises(CollectiveTimeoutError, match="waited 1 s"):
            dist.barrier()
    else:
        while not _links(group).lost:
            time.sleep(0.02)


def end_beside_it(work):
    """The main thread runs Python until an operation is done."""
    future = work.get_future()
    while not future.done():
        pass
    work.wait()


def large_beside_others():
    """Operations whose ranks differ in whether they wait: those that do not ask for long steps."""
    rank, world, count = dist.get_rank(), dist.get_world_size(), 10_000_001
    x = torch.empty(count)
    for here in (rank == 0, True):
        x.fill_(rank + 1.0)
        work = dist.all_reduce(x, async_op=here)
        if here:
            end_beside_it(work)
        assert x.eq(sum(range(1, world + 1))).all()
        x.fill_(rank)
        works = [dist.broadcast(x, world - 1, async_op=here)]
        out = torch.empty(count * world)
        works.append(dist.all_gather_into_tensor(out, x, async_op=here))
        back = torch.empty(count)
        works.append(dist.reduce_scatter_tensor(back, out, async_op=here))
        for work in works:
            if here:
                end_beside_it(work)
        assert out.eq(world - 1).all()
        assert back.eq(world * (world - 1)).all()
    state = shm_backend_of(dist.group.WORLD).state
    asked = {32}  # MiB, by threads
    if rank:
        asked |= {2, 32} if state._crowded else {2, 6}  # by a main thread: of reductions the 2
    return {len(region) >> 20 for region in state._staging.values()} == asked


@pytest.mark.parametrize("world", [2, 3])
def test_large_operations_of_a_thread_take_long_steps_on_all_ranks(world):
    assert all(on_ranks(large_beside_others, world))


@pytest.mark.parametrize("slots", [1, 3, 6])
@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("pieces", [1, 2, 7])
def test_slots_are_reused_only_after_all_ranks_have_read_them(slots, stages, pieces):
    ring = Ring(slots, 1)
    turns = list(ring.schedule(pieces, stages))
    for stage in range(stages):
        assert [turn[stage] for turn in turns if turn[stage] >= 0] == list(range(pieces))
    at = {(n, s): i for i, turn in enumerate(turns) for s, n in enumerate(turn) if n >= 0}
    for (piece, stage), turn in at.items():
        if stage:  # what all did in the stage before was posted, and taken
            assert turn - at[piece, stage - 1] > ring.lag(stages)
        if stage == 0 and piece >= slots:
            assert turn - at[piece - slots, stages - 1] > 0
