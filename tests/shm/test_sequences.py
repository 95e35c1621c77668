"""Random sequences of operations against plain arithmetic, and long ones that leave nothing behind.

With GRADWIRE_LONG=1 in the environment: 100,000 operations and 200 killed ranks, some minutes.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import gradwire.shm
from gradwire.shm.register import shm_backend_of
from gradwire.testing import run_ranks

LONG = os.environ.get("GRADWIRE_LONG") == "1"
KINDS = ["all_reduce", "max", "reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all"]
KINDS += ["gather", "scatter", "message"]


def numbers(rank, count, salt):
    return ((torch.arange(count) * 7 + rank * 13 + salt * 5) % 11).double()


def operation(kind, count, salt, inside, ranks, group):
    """Start one; returns its handles, what it fills, and what that must become."""
    me, world = dist.get_rank(group), len(ranks)
    in_segment = inside == "all" or (inside == "one" and me == salt % world)
    values = [numbers(r, count * world, salt) for r in range(world)]

    def tensor(content):
        if not in_segment:
            return content.clone()
        return gradwire.shm.empty(len(content), dtype=torch.float64, group=group).copy_(content)

    x, head = tensor(values[me]), tensor(values[me][:count])
    mine = slice(me * count, (me + 1) * count)
    options = {"group": group, "async_op": True}
    if kind == "all_reduce":
        return [dist.all_reduce(x, **options)], x, torch.stack(values).sum(0)
    if kind == "max":
        return [dist.all_reduce(x, dist.ReduceOp.MAX, **options)], x, torch.stack(values).amax(0)
    root = salt % world
    if kind == "reduce":
        expected = torch.stack(values).sum(0) if me == root else values[me]
        return [dist.reduce(x, ranks[root], **options)], x, expected
    if kind == "broadcast":
        return [dist.broadcast(x, ranks[root], **options)], x, values[root]
    if kind == "all_gather":
        work = dist.all_gather_into_tensor(x, head, **options)
        return [work], x, torch.cat([v[:count] for v in values])
    if kind == "reduce_scatter":
        work = dist.reduce_scatter_tensor(head, x, **options)
        return [work], head, torch.stack(values).sum(0)[mine]
    if kind == "all_to_all":
        out = torch.zeros_like(x)
        work = dist.all_to_all_single(out, x, **options)
        return [work], out, torch.cat([v[mine] for v in values])
    if kind == "gather":
        into = list(torch.zeros_like(x).split(count)) if me == root else None
        work = dist.gather(head, into, ranks[root], **options)
        expected = [v[:count] for v in values] if me == root else [values[me][:count]]
        return [work], into or [head], expected
    if kind == "scatter":
        out = torch.zeros_like(head)
        blocks = list(x.split(count)) if me == root else None
        return [dist.scatter(out, blocks, ranks[root], **options)], out, values[root][mine]
    to, source = ranks[(me + 1) % world], ranks[(me - 1) % world]
    out = torch.zeros_like(head)
    receive = dist.irecv(out, source, group, tag=salt)
    return [receive, dist.isend(head, to, group, tag=salt)], out, values[(me - 1) % world][:count]


def sequence(steps, seed, crowded):
    if crowded:  # all ranks on one core, by which their groups choose how to pass data
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        dist.barrier()
    groups = {
        name: (ranks, dist.new_group(ranks, backend="shm")) for name, ranks in SUBSETS.items()
    }
    assert not crowded or shm_backend_of(groups["all"][1]).state._crowded
    flying = []
    chance = random.Random(seed + dist.get_rank())  # ranks wait at different times
    for salt, (kind, count, inside, subset) in enumerate(steps):
        ranks, group = groups[subset]
        if dist.get_rank() in ranks:
            flying.append(operation(kind, count, salt, inside, ranks, group))
        while flying and chance.random() < 0.5:
            finish(*flying.pop(0))
    for entry in flying:
        finish(*entry)


def finish(works, got, expected):
    for work in works:
        work.wait()
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


SUBSETS = {"all": [0, 1, 2], "two": [0, 2], "other": [1, 2]}


def steps_of(counts, most):
    return st.lists(
        st.tuples(
            st.sampled_from(KINDS),
            st.sampled_from(counts),
            st.sampled_from(["none", "one", "all"]),
            st.sampled_from(sorted(SUBSETS)),
        ),
        min_size=1,
        max_size=most,
    )


def examples(few, many):
    return settings(
        max_examples=many if LONG else few,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )


@examples(12, 300)
@given(steps_of([1, 3, 900, 3_000, 20_000, 70_000], 12), st.integers(0, 9))
def test_random_sequences(steps, seed):
    run_ranks(sequence, 3, backend="shm", timeout=30, args=(steps, seed, False))


@pytest.mark.wide
@examples(12, 150)
@given(steps_of([3, 3_000, 40_000, 150_000, 600_000, 1_700_000], 8), st.integers(0, 9))
def test_random_sequences_of_more_ranks_than_cores(steps, seed):
    run_ranks(sequence, 3, backend="gloo", timeout=60, args=(steps, seed, True))


def usage():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 2**20, len(os.listdir("/proc/self/fd")), threading.active_count()


def soak(rounds):
    """What memory (MiB), descriptors and threads grow by after a warm-up."""
    world = dist.get_world_size()
    x, y, whole = torch.ones(100), torch.ones(20_000), torch.ones(20_000 * world)
    inside = gradwire.shm.empty(20_000).fill_(1.0)
    before = None
    for i in range(rounds):
        if i == rounds // 5:
            before = usage()
        dist.all_reduce(x, dist.ReduceOp.MAX)
        dist.all_reduce(inside, dist.ReduceOp.MAX, async_op=True).wait()
        dist.broadcast(y, i % world)
        dist.all_gather_into_tensor(whole, y)
        dist.barrier()
        works = [dist.isend(x, (dist.get_rank() + 1) % world)]
        works.append(dist.irecv(torch.empty(100), (dist.get_rank() - 1) % world))
        for work in works:
            work.wait()
    return [now - then for now, then in zip(usage(), before, strict=True)]


@pytest.mark.timeout(1200)
def test_many_operations_leak_nothing():
    rounds = 100_000 // 7 if LONG else 700
    for memory, descriptors, threads in run_ranks(
        soak, 2, backend="shm", timeout=900, args=(rounds,)
    ):
        assert memory < 8
        assert descriptors == 0
        assert threads == 0


SOON_S = 5.0  # far below the group's timeout: a machine may be busy


def stopped():
    """Rank 1 is stopped for a while; a long timeout sits it out, and no core is busy meanwhile."""
    if dist.get_rank() == 1:
        waker = subprocess.Popen(["sh", "-c", f"sleep 1; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
        waker.wait()
    x = torch.ones(50_000)
    burnt = time.process_time()
    dist.all_reduce(x)
    return time.process_time() - burnt


def test_a_stopped_rank_is_waited_for_asleep():
    assert run_ranks(stopped, 2, backend="shm", timeout=30)[0] < 0.3
