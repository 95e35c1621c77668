"""Changes of lists and tensors after an asynchronous call do not affect the call."""

from __future__ import annotations

import random
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.distributed_c10d import AllgatherOptions

import gradwire.shm
from gradwire import collectives
from gradwire.ddp import broadcast_coalesced
from gradwire.shm.register import shm_backend_of
from gradwire.testing import run_ranks

COUNT = 50


def forget(tensors):
    """Use the list for other tensors."""
    tensors[:] = [torch.full_like(tensor, -1.0) for tensor in tensors]


def replace(tensors):
    """Give the tensors other memory."""
    for tensor in tensors:
        tensor.data = torch.full_like(tensor, -1.0)


def shrink(tensors):
    """Keep one element of each."""
    for tensor in tensors:
        tensor.resize_(1)


def operations(world):
    """Each gives what it sends, what it fills, its handle, and what its results must become."""
    rank, group = dist.get_rank(), shm_backend_of(dist.group.WORLD)
    values = [[torch.arange(COUNT) + 100.0 * r + 1000 * i for i in range(world)] for r in (0, 1)]
    firsts = [blocks[0] for blocks in values]
    mine = [blocks[rank] for blocks in values]

    def zeros(count=world, length=COUNT):
        return [torch.zeros(length) for _ in range(count)]

    def reduce_scatter(sent, got):
        return dist.reduce_scatter(got[0], sent, async_op=True)

    def all_to_all(sent, got):
        return dist.all_to_all(got, sent, async_op=True)

    def all_gather(sent, got):
        return dist.all_gather(got, sent[0], async_op=True)

    def all_gather_single(sent, got):
        return dist.all_gather_into_tensor(got[0], sent[0], async_op=True)

    def all_gather_single_coalesced(sent, got):
        options = AllgatherOptions()
        options.asyncOp = True
        return group.all_gather_single_coalesced(got, sent, options)

    def gather(sent, got):
        return dist.gather(sent[0], got if rank == 0 else None, async_op=True)

    def scatter(sent, got):
        return dist.scatter(got[0], sent if rank == 0 else None, async_op=True)

    yield reduce_scatter, values[rank], zeros(1), [sum(mine)]
    yield all_to_all, values[rank], zeros(), mine
    yield all_gather, firsts[rank : rank + 1], zeros(), firsts
    yield all_gather_single, firsts[rank : rank + 1], zeros(1, 2 * COUNT), [torch.cat(firsts)]
    joined = [torch.cat(blocks) for blocks in zip(*values, strict=True)]
    yield all_gather_single_coalesced, values[rank], zeros(2, 2 * COUNT), joined
    yield gather, firsts[rank : rank + 1], zeros(), firsts if rank == 0 else zeros()
    yield scatter, values[rank], zeros(1), [values[0][rank]]


def changed_at_once(change):
    """Rank 0 changes its arguments before its thread can have come to the operation."""
    warnings.simplefilter("ignore")  # some names are old in newer versions of torch
    rank, world = dist.get_rank(), dist.get_world_size()
    wrong = []
    for run, given, results, expected in operations(world):
        sent, got, filled = [x.clone() for x in given], list(results), results
        first = torch.zeros(1)
        if rank == 1:
            dist.recv(first, 0)
        earlier = dist.all_reduce(first, async_op=True)
        work = run(sent, got)
        if rank == 0:
            change(sent)
            if change is forget:
                change(got)
            dist.send(first, 1)
        earlier.wait()
        work.wait()
        if not all(map(torch.equal, filled, expected)):
            wrong.append(run.__name__)
    return wrong


@pytest.mark.parametrize("change", [forget, replace, shrink])
def test_arguments_may_change_after_the_call(change):
    assert run_ranks(changed_at_once, 2, backend="shm", timeout=30, args=(change,)) == [[], []]


# -- results that overlap inputs equal results in separate memory


def overlapping_operations(world, count):
    """Each takes a (world, count) tensor and gives what is sent and where the results go."""
    rank, group = dist.get_rank(), dist.group.WORLD
    another = (rank + 1) % world
    shift = (world - 1) * count // world * world

    def gather(sent, got):
        group.gather([list(got)] if rank == 0 else [[]], [sent]).wait()

    def scatter(sent, got):
        group.scatter([got], [list(sent)] if rank == 0 else [[]]).wait()

    def all_to_all_single(sent, got):
        dist.all_to_all_single(got, sent)

    def all_gather(sent, got):
        dist.all_gather(list(got), sent)

    def reduce_scatter(sent, got):
        dist.reduce_scatter(got, list(sent))

    def half(x):  # from half a block on
        return x.view(-1)[count // 2 :]

    return {
        "all_to_all_single": (lambda x: (x, x), all_to_all_single),
        "all_to_all_single, shifted": (
            lambda x: (x.view(-1)[:shift], x.view(-1)[count:][:shift]),
            all_to_all_single,
        ),
        "all_to_all_single, by half a block": (
            lambda x: (x.view(-1)[:shift], half(x)[:shift]),
            all_to_all_single,
        ),
        "all_to_all": (
            lambda x: (x, x),
            lambda sent, got: dist.all_to_all(list(got), list(sent)),
        ),
        "all_gather in place": (lambda x: (x[rank], x), all_gather),
        "all_gather elsewhere": (lambda x: (x[another], x), all_gather),
        "all_gather by half a block": (lambda x: (half(x)[:count], x), all_gather),
        "all_gather_into_tensor elsewhere": (
            lambda x: (x[another], x.view(-1)),
            lambda sent, got: dist.all_gather_into_tensor(got, sent),
        ),
        "reduce_scatter in place": (lambda x: (x, x[rank]), reduce_scatter),
        "reduce_scatter elsewhere": (lambda x: (x, x[another]), reduce_scatter),
        "reduce_scatter_tensor elsewhere": (
            lambda x: (x.view(-1), x[another]),
            lambda sent, got: dist.reduce_scatter_tensor(got, sent),
        ),
        "gather": (lambda x: (x[1], x), gather),
        "gather by half a block": (lambda x: (half(x)[:count], x), gather),
        "scatter": (lambda x: (x, x[1]), scatter),
        "scatter by half a block": (lambda x: (x, half(x)[:count]), scatter),
    }


def overlapping(count, inside):
    warnings.simplefilter("ignore")  # some names are old in newer versions of torch
    rank, world = dist.get_rank(), dist.get_world_size()
    start = torch.arange(world * count).view(world, count) + 10_000_000.0 * rank
    wrong = []
    for name, (choose, run) in overlapping_operations(world, count).items():
        expected, x = start.clone(), gradwire.shm.empty((world, count)) if inside else start.clone()
        run(choose(expected.clone())[0], got := choose(expected)[1].clone())
        choose(expected)[1].copy_(got)
        for _ in range(3):  # what is wrong need not be wrong each time
            run(*choose(x.copy_(start)))
            if not torch.equal(x, expected):
                wrong.append(name)
        dist.barrier()
    return wrong


@pytest.mark.parametrize("inside", [False, True], ids=["ordinary", "in shared memory"])
@pytest.mark.parametrize("count", [100, 20_000, 700_000])
def test_results_that_overlap_inputs(count, inside):
    assert run_ranks(overlapping, 3, backend="shm", timeout=40, args=(count, inside)) == [[]] * 3


@pytest.mark.parametrize("inside", [False, True], ids=["ordinary", "in shared memory"])
@pytest.mark.parametrize("count", [20_000, 1_300_000])
@pytest.mark.on_ranks(2)
def test_a_result_over_overlapping_blocks(count, inside):
    """Blocks that lie over each other, and a result in the place of this rank's own."""
    rng, world = random.Random(count), dist.get_world_size()
    for _ in range(4):
        shifts = [
            [rng.choice([0, 1, 1000, count // 3]) for _ in range(world)] for _ in range(world)
        ]
        allocate = gradwire.shm.empty if inside else torch.empty
        start = [torch.arange(2.0 * count) % 1000 + r for r in range(world)]
        x = allocate(2 * count).copy_(start[dist.get_rank()])
        blocks = [x[shift : shift + count] for shift in shifts[dist.get_rank()]]
        mine = [shifts[r][dist.get_rank()] for r in range(world)]
        expected = sum(start[r][s : s + count] for r, s in enumerate(mine))
        dist.reduce_scatter(blocks[dist.get_rank()], blocks)
        assert blocks[dist.get_rank()].equal(expected), shifts
        dist.barrier()


@pytest.mark.parametrize("inside", [False, True], ids=["ordinary", "in shared memory"])
@pytest.mark.parametrize("count", [100, 200_000])
@pytest.mark.on_ranks(2)
def test_overlapping_tensors_of_a_list(count, inside):
    """A tensor that comes twice in a list, and windows of one: each sum is of what was there."""
    warnings.simplefilter("ignore")  # torch's, of the function's name
    rank, world = dist.get_rank(), dist.get_world_size()
    allocate = gradwire.shm.empty if inside else torch.empty
    start = torch.arange(2.0 * count) % 1000
    for choose in (
        lambda x: [x, x],
        lambda x: [x[:count], x[count // 2 :]],
        lambda x: [x.view(2, count).t(), x[count:]],
    ):
        for is_async in (False, True):
            x = allocate(2 * count).copy_(start + rank)
            work = dist.all_reduce_coalesced(choose(x), async_op=is_async)
            if is_async:
                work.wait()
            assert x.equal(world * start + sum(range(world)))


# -- pending results of functional collectives as arguments


def into(call, count):
    """Return a call whose result is in a tensor of so many elements."""

    def run(t):
        out = torch.zeros(count)
        call(out, t)
        return out

    return run


def in_place(call):
    return lambda t: call(t) or t


PENDING = {  # what a call gives of [1, 3] on each rank
    in_place(dist.all_reduce): [[2, 6]] * 2,
    in_place(lambda t: dist.all_reduce(t, async_op=True).wait() and None): [[2, 6]] * 2,
    in_place(lambda t: dist.broadcast(t, 0)): [[1, 3]] * 2,
    in_place(lambda t: broadcast_coalesced(dist.group.WORLD, [t])): [[1, 3]] * 2,
    into(dist.all_gather_into_tensor, 4): [[1, 3, 1, 3]] * 2,
    into(dist.reduce_scatter_tensor, 1): [[2], [6]],
    into(dist.all_to_all_single, 2): [[1, 1], [3, 3]],
    into(lambda out, t: dist.recv(out, 0) if dist.get_rank() else dist.send(t, 1), 2): [
        [0, 0],
        [1, 3],
    ],
    collectives.all_reduce: [[2, 6]] * 2,
    collectives.all_gather: [[1, 3, 1, 3]] * 2,
    collectives.reduce_scatter: [[2], [6]],
}


@pytest.mark.on_ranks(2)
def test_awaited_results_as_arguments():
    for number, (call, expected) in enumerate(PENDING.items()):
        mine = torch.arange(2.0) + dist.get_rank()
        pending = functional.all_reduce(mine, "sum", dist.group.WORLD)
        assert isinstance(pending, functional.AsyncCollectiveTensor)
        assert call(pending).tolist() == expected[dist.get_rank()], number
