"""gather and scatter with every combination of block sizes: correct, or an error on all ranks."""

from __future__ import annotations

from itertools import product

import pytest
import torch
import torch.distributed as dist

from gradwire import shm
from gradwire.errors import MismatchError
from gradwire.testing import run_ranks


def values(rank, count):
    return torch.arange(float(count)) + 10 * rank


def gather(have, expected, root, group=None):
    """Whether what each rank has came to the root as it expects it."""
    rank = dist.get_rank()
    into = [torch.zeros(count) for count in expected] if rank == root else None
    dist.gather(values(rank, have[rank]), into, root, group=group)
    return into is None or all(torch.equal(x, values(r, len(x))) for r, x in enumerate(into))


def scatter(expected, have, root, group=None):
    """Whether each rank got what the root has for it."""
    rank = dist.get_rank()
    blocks = [values(r, count) for r, count in enumerate(have)] if rank == root else None
    out = torch.zeros(expected[rank])
    dist.scatter(out, blocks, root, group=group)
    return torch.equal(out, values(rank, len(out)))


def all_sizes(sizes):
    size, moved, refused = dist.get_world_size(), 0, []
    tables = list(product(sizes, repeat=size))
    for root, call in product(range(size), (gather, scatter)):
        for ranks, of_root in product(tables, tables):
            if ranks == of_root:
                assert call(ranks, of_root, root), (call, ranks, of_root)
                moved += 1
            else:
                with pytest.raises(MismatchError) as caught:
                    call(ranks, of_root, root)
                refused.append(str(caught.value))
    return moved, refused


@pytest.mark.parametrize("size", [1, 2, pytest.param(3, marks=pytest.mark.wide)])
def test_every_combination_of_sizes(size):
    first, *others = run_ranks(all_sizes, size, backend="shm", timeout=60, args=([0, 2, 3],))
    assert all(other == first for other in others)  # the same errors everywhere
    moved, refused = first
    assert moved == 2 * size * 3**size
    assert len(refused) == 2 * size * (9**size - 3**size)
    assert all("number of elements: rank" in text for text in refused)


@pytest.mark.wide
@pytest.mark.parametrize("sizes", [[90_000] * 3, [0, 90_000, 5], [900_000, 3, 2_000_000]])
@pytest.mark.on_ranks(3)
def test_long_blocks(sizes):
    """Beyond what travels with headers, in ordinary memory and where ranks share it."""
    rank, size = dist.get_rank(), dist.get_world_size()
    own = shm.empty(sizes[rank]) if rank % 2 else torch.empty(sizes[rank])
    own.copy_(values(rank, sizes[rank]))
    for root in range(size):
        into = [torch.zeros(count) for count in sizes] if rank == root else None
        dist.gather(own, into, root)
        assert into is None or all(torch.equal(x, values(r, len(x))) for r, x in enumerate(into))
        flat = shm.empty(sum(sizes)) if root % 2 else torch.empty(sum(sizes))
        blocks = flat.split(sizes)
        for r, block in enumerate(blocks):
            block.copy_(values(r, len(block)))
        out = torch.zeros(sizes[rank])
        dist.scatter(out, list(blocks) if rank == root else None, root)
        assert torch.equal(out, values(rank, len(out)))


@pytest.mark.on_ranks(2)
def test_a_different_root_on_each_rank():
    with pytest.raises(MismatchError, match="gather's root: rank 0 has 0, rank 1 has 1"):
        gather([2, 2], [2, 2], dist.get_rank())
    assert gather([2, 2], [2, 2], 1)
