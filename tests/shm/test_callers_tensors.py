"""Changes of lists and tensors after an asynchronous call do not affect the call."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllgatherOptions

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
