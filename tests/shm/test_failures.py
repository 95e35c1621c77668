"""Ranks that disagree, die, stop or leave: an error on every other rank within a second."""

from __future__ import annotations

import gc
import os
import resource
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import gradwire.shm
from gradwire.errors import (
    BrokenGroupError,
    CollectiveTimeoutError,
    DistributedError,
    MismatchError,
    PeerLostError,
)
from gradwire.shm import segment
from gradwire.shm.register import shm_backend_of
from gradwire.testing import run_ranks

SOON_S = 5.0  # far below the group's timeout: a machine may be busy


def collectives(count):
    """One call of each kind, for the present group."""
    rank, world = dist.get_rank(), dist.get_world_size()
    x, whole = torch.ones(count), torch.ones(count * world)
    inside = gradwire.shm.empty(count)
    parts = list(torch.ones(count * world).chunk(world))
    return {
        "all_reduce": lambda: dist.all_reduce(x),
        "all_reduce inside": lambda: dist.all_reduce(inside),
        "reduce": lambda: dist.reduce(x, 0),
        "broadcast": lambda: dist.broadcast(x, 0),
        "all_gather": lambda: dist.all_gather(parts, x),
        "gather": lambda: dist.gather(x, parts if rank == 0 else None, 0),
        "scatter": lambda: dist.scatter(x, parts if rank == 0 else None, 0),
        "reduce_scatter": lambda: dist.reduce_scatter(x, parts),
        "all_to_all": lambda: dist.all_to_all_single(whole.clone(), whole),
        "barrier": dist.barrier,
    }


def mismatches():
    """What each of two ranks calls, and the error of both."""
    reduce, ones, world = dist.all_reduce, torch.ones, dist.group.WORLD
    text = "ranks disagree on "
    return [
        (
            [lambda: reduce(ones(3)), dist.barrier],
            "ranks call different collectives: rank 0 has all_reduce, rank 1 has barrier",
        ),
        (
            [lambda n=n: reduce(ones(n)) for n in (70_000, 70_001)],
            f"{text}all_reduce's number of elements: rank 0 has 70000, rank 1 has 70001",
        ),
        (
            [lambda d=d: reduce(ones(3, dtype=d)) for d in (torch.float32, torch.float64)],
            f"{text}all_reduce's dtype: rank 0 has torch.float32, rank 1 has torch.float64",
        ),
        (
            [lambda op=op: reduce(ones(3), op) for op in (dist.ReduceOp.MAX, dist.ReduceOp.SUM)],
            f"{text}all_reduce's reduce op: rank 0 has MAX, rank 1 has SUM",
        ),
        (
            [lambda src=src: dist.broadcast(ones(3), src) for src in (0, 1)],
            f"{text}broadcast's root: rank 0 has 0, rank 1 has 1",
        ),
        (
            [lambda n=n: dist.all_gather([ones(3), ones(n)], ones(n)) for n in (3, 4)],
            f"{text}all_gather's number of elements: rank 1 has 4 for rank 0, which expects 3",
        ),
        (
            [lambda n=n: world.broadcast([ones(n), ones(7 - n)]).wait() for n in (3, 4)],
            f"{text}broadcast_coalesced's tensors' dtypes and ",
        ),
    ]


@pytest.mark.on_ranks(2)
def test_a_mismatch_is_the_same_error_everywhere_and_the_group_goes_on():
    for calls, message in mismatches():
        with pytest.raises(MismatchError) as caught:
            calls[dist.get_rank()]()
        texts = [None] * 2
        dist.all_gather_object(texts, str(caught.value))
        assert texts[0] == texts[1]
        assert texts[0].startswith(message)


@pytest.mark.on_ranks(2)
def test_lists_that_disagree_are_refused_whole():
    """Lists that differ at their end, or in length, are refused before their first tensor moves."""
    rank, group = dist.get_rank(), dist.group.WORLD
    for more in ([3, 4 + rank], [3] * (2 + rank)):
        xs, wide = [torch.ones(n) for n in more], [torch.ones(2 * n) for n in more]
        for call in (
            lambda xs=xs: group.allreduce_coalesced(xs),
            lambda xs=xs, wide=wide: group.all_gather_single_coalesced(wide, xs),
            lambda xs=xs, wide=wide: group.reduce_scatter_single_coalesced(xs, wide),
        ):
            with pytest.raises(MismatchError, match="by checksum"):
                call().wait()
        assert all(x.eq(1).all() for x in (*xs, *wide))
    dist.barrier()


def test_a_peer_s_memory_must_not_be_able_to_shrink():
    fd = os.memfd_create("unsealed")
    try:
        os.ftruncate(fd, 4096)
        with pytest.raises(DistributedError, match="could shrink"):
            segment.check_sealed(fd)
    finally:
        os.close(fd)
    sealed = segment.create(4096)
    segment.check_sealed(sealed)
    os.close(sealed)


def lost_peer(kind, count, after, how):
    """How long another rank waited, and its error; rank 1 ends itself."""
    call = collectives(count)[kind]
    for _ in range(after):
        call()
    started = time.monotonic()
    if dist.get_rank() == 1:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(0)
    try:
        while True:
            call()
    except PeerLostError as error:
        taken = time.monotonic() - started
        with pytest.raises(BrokenGroupError, match="make a new one"):
            call()
        return taken, str(error)


KINDS = [
    *("all_reduce", "all_reduce inside", "reduce", "broadcast", "all_gather", "gather"),
    *("scatter", "reduce_scatter", "all_to_all", "barrier"),
]


# every kind of operation is the one that finds out, in some run
@pytest.mark.narrow(
    {"how": "killed", "kind": "all_reduce", "count": 300_000},
    {"how": "killed", "kind": "broadcast", "count": 4},
    {"how": "left", "kind": "all_gather", "count": 300_000},
)
@pytest.mark.parametrize("count", [4, 20_000, 300_000])
@pytest.mark.parametrize(
    ("how", "kind"),
    [("killed", k) for k in KINDS] + [("left", k) for k in ("all_reduce", "all_gather", "barrier")],
)
def test_a_death_is_an_error_on_all_other_ranks(how, kind, count):
    after = KINDS.index(kind)
    results = run_ranks(
        lost_peer, 3, backend="shm", timeout=20, may_die=[1], args=(kind, count, after, how)
    )
    assert results[1] is None
    for taken, message in (results[0], results[2]):
        assert taken < SOON_S, (kind, taken)
        assert "rank 1" in message


STOPPED_S = 1.0


def beside_a_stopped_rank(kind, amid):
    """Rank 1 is stopped by a signal; how long another rank's last call took, and its error."""
    rank, world = dist.get_rank(), dist.get_world_size()
    control, pids = dist.new_group(backend="shm"), [None] * world
    dist.all_gather_object(pids, os.getpid(), group=control)
    call = collectives(300_000)[kind]
    call()
    shm_backend_of(dist.group.WORLD).set_timeout(timedelta(seconds=STOPPED_S))
    if rank == 1 and amid:
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGSTOP)).start()
    elif rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    try:
        while True:
            started = time.monotonic()
            call()
    except DistributedError as error:
        taken, found = time.monotonic() - started, (type(error), str(error))
    finally:
        if rank == 0:
            for other in range(2, world):  # they have their error before rank 1 goes on
                dist.recv(torch.empty(1), other, control)
            os.kill(pids[1], signal.SIGCONT)
        elif rank > 1:
            dist.send(torch.empty(1), 0, control)
    dist.barrier(control)
    return taken, *found


@pytest.mark.narrow({"kind": "all_reduce", "amid": True}, {"kind": "barrier", "amid": False})
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("amid", [False, True])
def test_a_stopped_rank_is_a_timeout_on_the_others(kind, amid):
    # amid an operation of three ranks, one may fail because another did so before it
    world = 2 if amid else 3
    results = run_ranks(beside_a_stopped_rank, world, backend="shm", timeout=20, args=(kind, amid))
    for taken, error, message in results[:1] + results[2:]:
        assert error is CollectiveTimeoutError
        assert STOPPED_S <= taken < STOPPED_S + SOON_S
        assert "[1]" in message
    _, error, _ = results[1]
    assert issubclass(error, DistributedError)  # it goes on, and finds that the others failed


@pytest.mark.on_ranks(2)
def test_a_rank_that_leaves_early():
    """What rank 1 did before it left counts; what it did not do is an error."""
    group = dist.new_group(backend="shm")
    x = torch.ones(200_000)
    dist.all_reduce(x, group=group)
    if dist.get_rank() == 1:
        dist.destroy_process_group(group)
    else:
        with pytest.raises(PeerLostError, match="rank 1 left"):
            dist.all_reduce(x, group=group)
    dist.barrier()
    assert dist.get_rank() == 0 or x[0] == 2


def taken(collect=True):
    """Descriptors, threads and mappings of shared memory of this process."""
    if collect:
        gc.collect()  # groups of earlier tests, in a process that is kept
    dist.barrier()
    maps = Path("/proc/self/maps").read_text().count("memfd:gradwire")
    return len(os.listdir("/proc/self/fd")), threading.active_count(), maps


def destroy(group):
    dist.destroy_process_group(group)


def abort(group):
    dist.barrier()
    shm_backend_of(group).abort()
    dist.barrier()
    with pytest.raises(BrokenGroupError, match="aborted"):
        group.allreduce([torch.ones(3)]).wait()


@pytest.mark.parametrize("end", [destroy, abort])
@pytest.mark.on_ranks(2)
def test_groups_release_all_resources(end):
    before, peer = taken(), 1 - dist.get_rank()
    gc.disable()  # nothing may be left to it
    for _ in range(5):
        group = dist.new_group(backend="shm")
        work = dist.irecv(torch.zeros(1), peer, group=group)
        dist.send(torch.ones(1), peer, group=group)
        work.wait()
        dist.barrier()
        x = gradwire.shm.empty(100_000, group=group).fill_(1.0)
        dist.all_reduce(x, group=group, async_op=True).wait()
        for _ in range(20):
            y = gradwire.shm.empty(50_000, group=group).fill_(1.0)
            dist.all_reduce(y, group=group)
            del y
        end(group)
        del group, x, work
    after = taken(collect=False)
    gc.enable()
    assert before == after


@pytest.mark.on_ranks(2)
def test_a_full_limit_is_an_error_and_no_crash():
    soft = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, soft[1]))
    try:
        with pytest.raises(DistributedError, match="not enough memory for 8388608 bytes"):
            gradwire.shm.empty(1 << 21)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, soft)
    x = gradwire.shm.empty(1000).fill_(1.0)
    dist.all_reduce(x)
    assert x.sum() == 2000
