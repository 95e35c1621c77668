"""Tests for ranks that mpiexec started; test_mpi.py runs them through under_mpi.py."""

from __future__ import annotations

import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist
from mpi4py import MPI

import gradwire.shm
from gradwire.errors import ArgumentError, DistributedError, MismatchError, PeerLostError
from gradwire.shm import Options
from gradwire.shm.hierarchy import mpi
from gradwire.shm.hierarchy.mpi import MpiEngine
from gradwire.shm.register import shm_backend_of
from gradwire.testing import run_ranks

TWO = (2, 2)


def engine_of(group):
    return shm_backend_of(group)._group.state.transport._engine


def messages():
    rank, group = dist.get_rank(), dist.group.WORLD
    assert isinstance(engine_of(group), MpiEngine)
    largest = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB)
    if largest < 2**30:
        with pytest.raises(ArgumentError, match="tag is"):
            group.send([torch.ones(1)], (rank + 2) % 4, largest)
    x = torch.empty(0)
    if rank == 0:
        dist.recv(torch.empty(0), 2)
        sources = []
        for _ in range(3):
            y = torch.zeros(100_000)
            sources.append(dist.recv(y, tag=5))
            assert y.unique().tolist() == [float(sources[-1])]
        return sorted(sources)
    if rank == 2:
        dist.send(x, 0)
    dist.send(torch.full((100_000,), float(rank)), 0, tag=5)
    return None


def test_messages_of_any_rank_and_none():
    assert run_ranks(messages, 4, hosts=TWO)[0] == [1, 2, 3]


def misfitting():
    rank = dist.get_rank()
    if rank == 2:
        dist.send(torch.ones(3), 0)
    if rank == 0:
        with pytest.raises(MismatchError, match="rank 2 sent 12 bytes, to be received into 20"):
            dist.recv(torch.ones(5), 2)


def test_a_message_of_another_size():
    run_ranks(misfitting, 4, hosts=TWO)


def at_once():
    """Collectives of two groups, in two threads, in orders of their own."""
    rank = dist.get_rank()
    groups = [
        dist.new_group(backend="shm", pg_options=Options(host="AABB"[rank])),
        dist.new_group([3, 0, 1], backend="shm", pg_options=Options(host="AABB"[rank])),
    ]
    failures = []

    def use(group, total, seed):
        try:
            for number in range(30):
                count = [3, 5_000, 300_000][(number + seed) % 3]
                x = torch.full((count,), float(rank))
                dist.all_reduce(x, group=group)
                assert x.unique().tolist() == [total]
        except BaseException as error:
            failures.append(error)

    calls = [(groups[0], 6.0, 0)] + [(groups[1], 4.0, 1)] * (rank != 2)
    threads = [threading.Thread(target=use, args=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    for group, *_ in calls:
        dist.destroy_process_group(group)


def test_two_groups_at_once():
    run_ranks(at_once, 4, backend="gloo")


def left_behind():
    for _ in range(3):
        options = Options(host="AABB"[dist.get_rank()])
        group = dist.new_group(backend="shm", pg_options=options)
        comm = engine_of(group)._comm
        dist.all_reduce(torch.ones(100_000), group=group)
        dist.destroy_process_group(group)
        assert comm == MPI.COMM_NULL
    assert not [t for t in threading.enumerate() if "mpi" in t.name]


def test_communicators_are_freed():
    run_ranks(left_behind, 4, backend="gloo")


def out_of_order():
    """A send that nobody receives, and a receive that nobody sends to, as the group is left."""
    rank = dist.get_rank()
    kept = len(mpi._KEPT)
    options = Options(host="AABB"[rank])
    group = dist.new_group(backend="shm", pg_options=options)
    engine = engine_of(group)
    x = torch.ones(1_000_000)
    if rank == 0:
        dist.isend(x, 2, group=group)
    if rank == 3:
        work = dist.irecv(x, 1, group=group)
    dist.barrier()
    dist.destroy_process_group(group)
    if rank == 3:
        with pytest.raises(DistributedError):
            work.wait()
    assert not engine._thread.is_alive()
    # with the message under way, its number may not be another communicator's; some MPIs take what
    # is sent to where it will be received
    if rank:
        assert (len(mpi._KEPT) > kept) == (rank == 2)


def test_pending_messages_end_when_a_group_is_left():
    run_ranks(out_of_order, 4, backend="gloo")


def leaving():
    rank = dist.get_rank()
    x = torch.ones(1_000_000)
    dist.all_reduce(x)
    if rank == 3:
        dist.destroy_process_group()
        return
    with pytest.raises(PeerLostError):  # not that the time is over
        dist.recv(x, 3)


def test_waits_for_a_rank_that_left_raise():
    run_ranks(leaving, 4, hosts=TWO)


def without():
    rank = dist.get_rank()
    if rank == 3:
        sys.modules["mpi4py"] = None
    try:
        with pytest.raises(DistributedError if rank != 3 else NotImplementedError) as caught:
            dist.new_group(backend="shm", pg_options=Options(host="AABB"[rank]))
    finally:
        sys.modules.pop("mpi4py", None)
    return str(caught.value)


def test_a_rank_without_mpi4py_is_an_error_on_all():
    assert "gradwire[mpi]" in run_ranks(without, 4, backend="gloo")[3]


def far_apart():
    """A message that waits long, and one amid a collective's."""
    rank = dist.get_rank()
    if rank == 2:
        time.sleep(0.5)
        work = dist.isend(torch.ones(2_000_000), 1, tag=9)
        dist.all_reduce(torch.ones(300_000))
        work.wait()
    else:
        x = torch.zeros(2_000_000)
        if rank == 1:
            dist.recv(x, 2, tag=9)  # though rank 2 waits for this one, elsewhere
            assert x.unique().tolist() == [1.0]
        dist.all_reduce(torch.ones(300_000))
    return gradwire.shm.teams(dist.group.WORLD)


def test_messages_make_progress_without_a_wait():
    assert run_ranks(far_apart, 4, hosts=TWO)[0] == ((0, 1), (2, 3))
