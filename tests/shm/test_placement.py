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
@pytest.mark.on_ranks(2, backend="gloo")
def test_ranks_on_one_core_are_detected() -> None:
    group = dist.new_group(backend="shm")
    peer, state = 1 - dist.get_rank(), shm_backend_of(group).state
    assert state._spins == semaphores._SPINS
    dist.barrier()
    with pinned_to(min(os.sched_getaffinity(0))):
        for count in (1, 1 << 14, 1 << 19):
            x = torch.full((count,), dist.get_rank() + 1.0)
            dist.all_reduce(x, group=group)
            assert (x == 3).all()
        state._placement.is_beside(peer)  # notes this rank's core
        dist.barrier()
        assert state._placement.is_beside(peer)


@pytest.mark.wide
@TWO_CORES
@pytest.mark.on_ranks(4, backend="gloo")
def test_messages_between_pinned_ranks_that_share_cores() -> None:
    """A rank spins for those of ranks on other cores only."""
    (first, second, *_), rank = sorted(os.sched_getaffinity(0)), dist.get_rank()
    with pinned_to(second if rank else first):
        dist.barrier()
        group = dist.new_group(backend="shm")
        others = [peer for peer in range(4) if peer != rank]
        for count in (1, 1000, 1 << 18):
            sent = [dist.isend(torch.full((count,), rank * 10.0 + p), p, group) for p in others]
            for peer in others:
                received = torch.empty(count)
                dist.recv(received, peer, group)
                assert (received == peer * 10.0 + rank).all()
            for work in sent:
                work.wait()
        rings = [shm_backend_of(group).messages.incoming[peer]._arrivals.ring for peer in others]
        spins = [ring._filled._spins > 1 for ring in rings]
        assert spins == [True, rank == 0, rank == 0]
