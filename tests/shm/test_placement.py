"""A rank yields its core at once if and only if the awaited rank is on the same core."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist

from gradwire.shm import semaphores
from gradwire.shm.register import shm_backend_of
from gradwire.shm.semaphores import PLACE_BYTES, Placement
from gradwire.testing import run_ranks

TWO_CORES = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core")


@contextmanager
def pinned_to(core: int) -> Iterator[None]:
    usable = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, usable)


@TWO_CORES
def test_a_rank_is_beside_the_one_that_waited_on_its_core() -> None:
    first, second, *_ = sorted(os.sched_getaffinity(0))
    memory = memoryview(bytearray(3 * PLACE_BYTES))
    ranks = [Placement(memory, rank) for rank in range(3)]
    with pinned_to(first):
        assert not ranks[0].is_beside(1), "rank 1 has not waited yet"
        assert ranks[1].is_beside(0)
    with pinned_to(second):
        assert not ranks[0].is_beside(1)
        assert not ranks[2].is_beside(1)
        assert ranks[1].is_beside(2)
        ranks[1].close()
        assert ranks[1].is_beside(2)


def waits_on_one_core(core: int) -> bool:
    """Whether, in a group of spinning ranks, what was sent arrives when both are on one core."""
    group = dist.new_group(backend="shm")
    rank, peer = dist.get_rank(), 1 - dist.get_rank()
    state = shm_backend_of(group).state
    assert state._spins == semaphores._SPINS
    dist.barrier()
    with pinned_to(core):
        for count in (1, 1 << 14, 1 << 19):
            x = torch.full((count,), rank + 1.0)
            dist.all_reduce(x, group=group)
            assert (x == 3).all()
            received = torch.empty(count)
            for source in (0, 1):
                if rank == source:
                    dist.send(x + rank, peer, group)
                else:
                    dist.recv(received, peer, group)
                    assert (received == 3 + source).all()
        state._placement.is_beside(peer)  # notes this rank's core
        dist.barrier()
        return state._placement.is_beside(peer)


@TWO_CORES
def test_ranks_on_one_core_are_detected() -> None:
    core = min(os.sched_getaffinity(0))
    assert run_ranks(waits_on_one_core, 2, backend="gloo", args=(core,), timeout=60) == [True] * 2
