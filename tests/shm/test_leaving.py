"""Ranks that die, fork, abort, or run out of resources; groups made again."""

from __future__ import annotations

import fcntl
import os
import resource
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import gradwire.shm
from gradwire._processes import Deadline, wait_until
from gradwire.errors import (
    BrokenGroupError,
    CollectiveTimeoutError,
    DistributedError,
    PeerFailedError,
    PeerLostError,
)
from gradwire.shm.links import Kind, Links, Message
from gradwire.shm.register import shm_backend_of
from gradwire.testing import run_ranks

SOON_S = 5.0  # far below the group's timeout: a machine may be busy


def forked():
    """Rank 1 is killed while a child of its still has all that it inherited."""
    x = torch.ones(3)
    dist.all_reduce(x)
    if dist.get_rank() == 1:
        reading, writing = os.pipe()
        if os.fork() == 0:
            try:
                dist.all_reduce(x)
            except BrokenGroupError as error:
                os.write(writing, str(error).encode())
            dist.destroy_process_group()
            time.sleep(1.5 * SOON_S)
            os._exit(0)
        assert b"forked" in os.read(reading, 1000)
    dist.all_reduce(x)  # the child's end is not taken for this rank's
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(PeerLostError):
        dist.all_reduce(x)
    return time.monotonic() - started


def test_a_child_does_not_hide_its_parent_s_death():
    waited = run_ranks(forked, 2, backend="shm", timeout=20, may_die=[1])[0]
    assert waited < SOON_S


@pytest.mark.on_ranks(2)
def test_abort_ends_what_is_in_flight():
    """Rank 1 takes no part; rank 0 aborts what it waits for."""
    group = dist.new_group(backend="shm")
    if dist.get_rank() == 0:
        works = [dist.all_reduce(torch.ones(3), group=group, async_op=True)]
        works.append(dist.irecv(torch.ones(3), 1, group))
        group.abort()
        started = time.monotonic()
        for work in works:
            with pytest.raises(BrokenGroupError, match="aborted"):
                work.wait()
        dist.destroy_process_group(group)
        assert time.monotonic() - started < SOON_S
    else:
        with pytest.raises(PeerFailedError, match="aborted"):
            dist.recv(torch.ones(3), 0, group)
    dist.barrier()


def short_of(what):
    """Rank 1 cannot map, or not even take, the memory that rank 0 shares."""
    group = dist.new_group(backend="shm")
    dist.barrier()
    limits = resource.getrlimit(what)
    if dist.get_rank() == 1:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        few = {
            resource.RLIMIT_NOFILE: 3,
            resource.RLIMIT_AS: pages * resource.getpagesize() + (8 << 20),
        }
        resource.setrlimit(what, (few[what], limits[1]))
    dist.barrier()
    x = gradwire.shm.empty(4_000_000, group=group) if dist.get_rank() == 0 else None
    dist.barrier()
    if dist.get_rank() == 1:
        wait_until(lambda: shm_backend_of(group).state.links.lost, 5)
    resource.setrlimit(what, limits)
    dist.barrier()
    x = torch.ones(4_000_000) if x is None else x
    with pytest.raises(DistributedError) as caught:
        dist.all_reduce(x, group=group)
    return str(caught.value)


@pytest.mark.parametrize(
    ("what", "message"),
    [(resource.RLIMIT_AS, "cannot be mapped"), (resource.RLIMIT_NOFILE, "ulimit -n")],
)
def test_failed_allocations_are_errors_on_all_ranks(what, message):
    for error in run_ranks(short_of, 2, backend="shm", timeout=20, args=(what,)):
        assert message in error


@pytest.mark.on_ranks(2)
def test_a_receive_s_callback_may_wait():
    """A receive's callback receives more, and takes part in a collective that needs the links."""
    peer, seen = 1 - dist.get_rank(), []

    def then(future):
        x, y = torch.ones(60_000), torch.zeros(2)
        dist.all_reduce(x)
        dist.recv(y, peer, tag=2)
        seen.extend((x[0].item(), y[0].item()))

    future = dist.irecv(torch.zeros(3), peer, tag=1).get_future().then(then)
    dist.barrier()
    dist.send(torch.ones(3), peer, tag=1)
    dist.send(torch.ones(2), peer, tag=2)
    future.wait()
    assert seen == [2.0, 1.0]


class Listening:
    """Links to one peer, and what comes from it."""

    def __init__(self, connection: socket.socket) -> None:
        self.received: list[object] = []
        self.lost = threading.Event()
        self.links = Links({1: connection})
        self.links.receive = lambda peer, message: self.received.append(message.data)
        self.links.on_lost = lambda peer: self.lost.set()
        self.links.start()


def pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def fill(links: Links) -> None:
    while True:
        links.send(1, Message(Kind.DATA, data=b"x" * 1000), Deadline(0.05))


def test_a_peer_that_reads_nothing_still_gets_the_failure() -> None:
    here, there = pair()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 4096)), hard))
    far = socket.socket(fileno=fcntl.fcntl(here.fileno(), fcntl.F_DUPFD_CLOEXEC, 1100))
    here.close()
    listening = Listening(far)
    with pytest.raises(CollectiveTimeoutError):
        fill(listening.links)
    listening.links.report_failure(ValueError("over"))
    while there.recv(2000):
        pass  # until end-of-file, which needs the peer's failure to be reported
    listening.links.close()
    there.close()
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# -- long sequences leave nothing behind, and a stopped rank is waited for


LONG = os.environ.get("GRADWIRE_LONG") == "1"


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


@pytest.mark.on_ranks(2)
def test_a_stopped_rank_is_waited_for_asleep():
    """Rank 1 is stopped for a while; a long timeout sits it out, and no core is busy meanwhile."""
    if dist.get_rank() == 1:
        waker = subprocess.Popen(["sh", "-c", f"sleep 1; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
        waker.wait()
    x = torch.ones(50_000)
    burnt = time.process_time()
    dist.all_reduce(x)
    assert dist.get_rank() == 1 or time.process_time() - burnt < 0.3
