"""Results that overlap inputs equal results in separate memory."""

from __future__ import annotations

import random
import warnings

import pytest
import torch
import torch.distributed as dist

import gradwire.shm
from gradwire.testing import run_ranks


def operations(world, count):
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
    for name, (choose, run) in operations(world, count).items():
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
