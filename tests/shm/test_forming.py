"""Failures while a group is formed: a prompt error on all ranks."""

from __future__ import annotations

import errno
import os
import signal
import socket
import sys
import threading
import time
from contextlib import nullcontext
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import gradwire.shm
from gradwire._groups import values_of_ranks
from gradwire.errors import (
    ArgumentError,
    CollectiveTimeoutError,
    DistributedError,
    MismatchError,
    PeerFailedError,
    PeerLostError,
)
from gradwire.shm.register import make_backend
from gradwire.shm.rendezvous import Forming
from gradwire.testing import run_ranks

SOON_S = 5.0
FULL = OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def left_behind():
    """Descriptors and threads of this process."""
    return len(os.listdir("/proc/self/fd")), threading.active_count()


def without(owner, name, failing):
    """What each rank gets when on one of them the system refuses a call."""
    rank = dist.get_rank()
    dist.barrier()
    before = left_behind()
    refused = mock.patch.object(owner, name, side_effect=FULL) if rank == failing else nullcontext()
    started = time.monotonic()
    with refused, pytest.raises(DistributedError) as caught:
        dist.new_group(backend="shm")
    taken, kind, message = time.monotonic() - started, type(caught.value), str(caught.value)
    del caught  # its traceback holds what the attempt opened
    assert taken < SOON_S
    dist.barrier()
    assert left_behind() == before
    x = torch.ones(3)
    group = dist.new_group(backend="shm")  # the next attempt is not spoilt by this one
    assert gradwire.shm.shares_memory(group)
    dist.all_reduce(x, group=group)
    assert x.tolist() == [3.0] * 3
    dist.destroy_process_group(group)
    return kind.__name__, message


@pytest.mark.parametrize(
    ("owner", "name", "failing"),
    [
        (socket.socket, "bind", 1),
        (socket.socket, "accept", 0),
        (os, "memfd_create", 0),
        (os, "pipe", 2),
    ],
    ids=["bind", "accept", "memory", "pipe"],
)
def test_a_rank_that_cannot_form_a_group_keeps_none_waiting(owner, name, failing):
    results = run_ranks(without, 3, backend="shm", timeout=30, args=(owner, name, failing))
    for rank, (kind, message) in enumerate(results):
        if rank == failing:
            assert kind == DistributedError.__name__
            assert FULL.strerror in message
        else:  # it may have seen the end of its connection first
            assert kind in (PeerFailedError.__name__, PeerLostError.__name__)


@pytest.mark.on_ranks(3, backend="gloo")
def test_a_rank_that_gave_up_keeps_none_waiting():
    """Rank 1 gives up before the others begin, which a longer timeout would let wait."""
    rank = dist.get_rank()
    dist.barrier()
    time.sleep(0 if rank == 1 else 1.5)
    started = time.monotonic()
    options = gradwire.shm.Options(host=f"host {rank // 2}")
    with pytest.raises((CollectiveTimeoutError, PeerFailedError), match="did not join") as caught:
        dist.new_group(
            backend="shm", timeout=timedelta(seconds=0.5 if rank == 1 else 60), pg_options=options
        )
    assert time.monotonic() - started < SOON_S
    assert caught.type is (CollectiveTimeoutError if rank == 1 else PeerFailedError)


@pytest.mark.on_ranks(2)
def test_a_timeout_of_zero_is_refused():
    with pytest.raises(ArgumentError, match="timeout is 0:00:00"):
        dist.new_group(backend="shm", timeout=timedelta(0))


@pytest.mark.on_ranks(3, may_die=[1])
def test_a_death_amid_forming_reaches_the_others():
    """Rank 1 dies when all have reached each other, before there is a group to notice it."""
    register = sys.modules["gradwire.shm.register"]  # the package has a function of that name

    def connected(*_):
        os.kill(os.getpid(), signal.SIGKILL)

    place = nullcontext()
    if dist.get_rank() == 1:
        place = mock.patch.object(register, "join", connected)
    with place, pytest.raises(PeerLostError, match="died"):
        dist.new_group(backend="shm")


@pytest.mark.parametrize("kind", ["file", "hash", "tcp"])
def test_missing_ranks_are_named(kind, tmp_path):
    soon = timedelta(seconds=0.5)
    if kind == "file":
        store = dist.FileStore(str(tmp_path / "store"), 3)
        store.set_timeout(soon)
    elif kind == "hash":
        store = dist.HashStore()
        store.set_timeout(soon)
    else:
        store = dist.TCPStore("localhost", 0, is_master=True, timeout=soon)
    Forming(store, 1, range(3)).store.set("available/1", "yes")
    before = left_behind()
    with pytest.raises(CollectiveTimeoutError, match=r"ranks \[2\] did not join"):
        make_backend(store, 0, range(3), soon)
    assert left_behind() == before


@pytest.mark.on_ranks(4, backend="gloo")
def test_groups_of_one_name_and_different_ranks_are_kept_apart():
    """Make a group of two ranks, which the other two do not call for."""
    rank = dist.get_rank()
    group = dist.new_group([0, 3] if rank in (0, 3) else [1, 2], backend="shm")
    x = torch.tensor([10.0**rank])
    dist.all_reduce(x, group=group)
    assert x.item() == (1001 if rank in (0, 3) else 110)


@pytest.mark.on_ranks(3, backend="gloo")
def test_ranks_that_form_different_groups_all_get_an_error():
    ranks = [0, 1] if dist.get_rank() == 0 else [0, 1, 2]
    with pytest.raises(MismatchError, match="different groups under one name"):
        dist.new_group(ranks, backend="shm")
    group = dist.new_group(backend="shm")
    assert group.size() == 3


def test_a_name_is_used_again_by_more_ranks():
    store, soon = dist.HashStore(), timedelta(seconds=10)
    for world in (2, 3):

        def form(rank: int, world: int = world) -> None:
            make_backend(store, rank, range(world), soon).shutdown()

        threads = [threading.Thread(target=form, args=(rank,)) for rank in range(world)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive()


def test_a_store_that_is_gone_while_a_group_forms():
    served = dist.TCPStore("localhost", 0, is_master=True)
    store = dist.TCPStore("localhost", served.port, is_master=False)
    del served
    with pytest.raises(PeerLostError, match="store does not answer"):
        values_of_ranks(store, "available", 2, "join the group")


@pytest.mark.parametrize("poll", [0.002, 0.2])
@pytest.mark.parametrize("kind", ["file", "tcp"])
def test_values_of_ranks_keep_their_deadline(kind, poll, tmp_path):
    store = dist.FileStore(str(tmp_path / "store"), 1)
    if kind == "tcp":
        store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    checks = []

    def check():  # after which no time is left to wait
        checks.append(time.sleep(1.4))

    with pytest.raises(CollectiveTimeoutError, match=r"ranks \[0\] did not come"):
        values_of_ranks(
            store, "key", 1, "come", timeout=timedelta(seconds=1.3), check=check, poll=poll
        )
    assert len(checks) <= 1  # none after the deadline


def test_short_polls_of_a_tcp_store_are_silent(capfd):
    store, soon = dist.TCPStore("127.0.0.1", 0, is_master=True), timedelta(seconds=0.3)
    with pytest.raises(CollectiveTimeoutError):
        values_of_ranks(store, "key", 1, "come", timeout=soon, poll=0.002)
    assert "timed out" not in capfd.readouterr().err  # c10d warns of each wait that times out
