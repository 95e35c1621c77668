"""Reconfigurable groups: lost members are removed, new ones added."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from gradwire._torch import PYTHON_BACKENDS
from gradwire.errors import (
    ArgumentError,
    BrokenGroupError,
    CollectiveTimeoutError,
    PeerFailedError,
    PeerLostError,
)
from gradwire.shm.group.reconfigure import ReconfigurableGroup
from gradwire.testing import run_ranks


def made(seconds=20.0):
    """A group of this rank, and every rank's handle."""
    group = ReconfigurableGroup(dist.get_rank(), dist.get_world_size(), timedelta(seconds=seconds))
    handles = [None] * dist.get_world_size()
    dist.all_gather_object(handles, group.get_reconfigure_handle())
    return group, handles


def formed(group, uuid, handles, seconds=None):
    timeout = None if seconds is None else timedelta(seconds=seconds)
    group.reconfigure(SimpleNamespace(uuid=uuid, handles=handles, timeout=timeout)).wait()
    return group.rank(), group.size()


def total(group):
    x = torch.tensor([10.0 ** dist.get_rank()])
    group.allreduce([x]).wait()
    return int(x.item())


def members_change():
    group, handles = made()
    with pytest.raises(BrokenGroupError, match="reconfigure first"):
        total(group)
    rank, placed = dist.get_rank(), []
    placed.append((*formed(group, 1, handles), total(group)))
    if rank != 1:
        placed.append((*formed(group, 2, [handles[2], handles[0]]), total(group)))
    dist.barrier()
    placed.append((*formed(group, 3, set(handles)), total(group)))
    group.shutdown()
    with pytest.raises(BrokenGroupError, match="destroyed"):
        group.get_reconfigure_handle()
    return placed


def test_members_are_removed_and_added():
    first, second, third = run_ranks(members_change, 3, timeout=60)
    assert first[:2] == [(0, 3, 111), (1, 2, 101)]
    assert second[:1] == [(1, 3, 111)]
    assert third[:2] == [(2, 3, 111), (0, 2, 101)]
    last = [placed[-1] for placed in (first, second, third)]
    assert {rank for rank, _, _ in last} == {0, 1, 2}
    assert all(rest == [3, 111] for _, *rest in last)


def one_dies():
    group, handles = made()
    formed(group, 1, handles)
    pending = torch.ones(3)
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    work = group.recv([pending], 1)  # nobody will ever send it
    with pytest.raises(PeerLostError):
        total(group)
    result = (*formed(group, 2, [handles[0], handles[2]]), total(group))
    with pytest.raises((PeerLostError, BrokenGroupError)):
        work.wait()
    with pytest.raises((PeerLostError, PeerFailedError)):
        formed(group, 3, handles, seconds=10)
    again = (*formed(group, 4, [handles[0], handles[2]]), total(group))
    group.shutdown()
    return result, again


def test_the_group_goes_on_without_the_dead():
    results = run_ranks(one_dies, 3, timeout=60, may_die=[1])
    assert results == [((0, 2, 101),) * 2, None, ((1, 2, 101),) * 2]


def one_stays_away():
    group, handles = made()
    if dist.get_rank() == 0:
        with pytest.raises(CollectiveTimeoutError, match=r"\[1\]"):
            formed(group, 1, handles, seconds=0.3)
    dist.barrier()
    # the connection that came too late for the first forming is not taken for one of the second
    result = formed(group, 2, handles)
    group.shutdown()
    return result


@pytest.mark.wide
def test_absent_members_are_an_error_and_may_join_later():
    assert run_ranks(one_stays_away, 2, timeout=60) == [(0, 2), (1, 2)]


def wrong_arguments():
    group, handles = made()
    cases = (
        ("lacks the handle of this process", handles[1:] if dist.get_rank() == 0 else handles[:1]),
        ("contains duplicates", [*handles, handles[0]]),
        ("strings that get_reconfigure_handle returned", [*handles, "nccl2:0"]),
    )
    for i, (words, given) in enumerate(cases):
        with pytest.raises(ArgumentError, match=words):
            formed(group, 10 + i, given)
    formed(group, 1, handles)
    with pytest.raises(ArgumentError, match="uuid is 1"):
        formed(group, 1, handles)
    assert total(group) == 11  # a refused call leaves the group as it was
    group.shutdown()


def test_wrong_arguments():
    run_ranks(wrong_arguments, 2, timeout=60)


def through_torch(path):
    rank, store = dist.get_rank(), dist.FileStore(path, 2)
    dist.destroy_process_group()
    dist.init_process_group("shm", store=store, rank=rank, world_size=2, enable_reconfigure=True)
    group = dist.group.WORLD
    assert group.supports_reconfigure
    store.set(f"handle {rank}", group.get_reconfigure_handle())
    handles = [store.get(f"handle {r}").decode() for r in range(2)]
    dist.distributed_c10d._reconfigure(1, handles[::-1]).wait()
    x = torch.ones(2) * (1 + rank)
    dist.all_reduce(x)
    assert x.tolist() == [3.0, 3.0]
    assert (dist.get_rank(), dist.get_world_size()) == (1 - rank, 2)


@pytest.mark.skipif(not PYTHON_BACKENDS, reason="this torch has no enable_reconfigure")
def test_through_torch_distributed(tmp_path):
    run_ranks(through_torch, 2, timeout=60, args=(str(tmp_path / "store"),))
