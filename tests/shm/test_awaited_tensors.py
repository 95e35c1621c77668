"""Pending results of functional collectives as arguments of other operations."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from gradwire import collectives
from gradwire.ddp import broadcast_coalesced
from gradwire.testing import run_ranks


def test_awaited_results_as_arguments():
    def main():
        def awaited():  # [1, 3]
            mine = torch.arange(2.0) + dist.get_rank()
            result = functional.all_reduce(mine, "sum", dist.group.WORLD)
            assert isinstance(result, functional.AsyncCollectiveTensor)
            return result

        rank, out = dist.get_rank(), torch.zeros(2)
        for in_place in (
            dist.all_reduce,
            lambda t: dist.all_reduce(t, async_op=True).wait(),
            lambda t: dist.reduce(t, 0),
        ):
            t = awaited()
            in_place(t)
            assert rank == 1 or t.tolist() == [2, 6]
        for same in (
            lambda t: dist.broadcast(t, 0),
            lambda t: broadcast_coalesced(dist.group.WORLD, [t]),
        ):
            t = awaited()
            same(t)
            assert t.tolist() == [1, 3]
        gathered = torch.zeros(4)
        dist.all_gather_into_tensor(gathered, awaited())
        assert gathered.tolist() == [1, 3, 1, 3]
        part = torch.zeros(1)
        dist.reduce_scatter_tensor(part, awaited())
        assert part.item() == (2, 6)[rank]
        dist.all_to_all_single(out, awaited())
        assert out.tolist() == ([1, 1], [3, 3])[rank]
        t = awaited()
        if rank == 0:
            dist.send(t, 1)
        else:
            dist.recv(out, 0)
            assert out.tolist() == [1, 3]
        assert collectives.all_reduce(awaited()).tolist() == [2, 6]
        assert collectives.all_gather(awaited()).tolist() == [1, 3, 1, 3]
        assert collectives.broadcast(awaited(), src=0).tolist() == [1, 3]
        assert collectives.reduce_scatter(awaited()).tolist() == [[2], [6]][rank]

    run_ranks(main, 2, backend="shm", timeout=60)
