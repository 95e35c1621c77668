"""Signals, other threads, forks and limits amid a group's work: errors, never hangs."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import BarrierOptions

import gradwire.shm
from gradwire.collectives import all_reduce
from gradwire.errors import BrokenGroupError, DistributedError, NotSupportedError
from gradwire.shm.register import shm_backend_of

SOON_S = 10.0


def left_behind():
    """Descriptors, threads and mappings of gradwire's memory of this process."""
    with open("/proc/self/maps") as maps:
        mapped = sum("memfd:gradwire" in line for line in maps)
    return len(os.listdir("/proc/self/fd")), threading.active_count(), mapped


def interrupted(handler, collective):
    """Run a collective that waits for the other rank, with a handler that comes amid it."""
    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    started = time.monotonic()
    try:
        collective()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        assert time.monotonic() - started < SOON_S


@pytest.mark.on_ranks(2)
def test_a_group_can_be_destroyed_in_a_signal_s_handler():
    group = dist.new_group(backend="shm")
    before = left_behind()
    waited_for = BarrierOptions()
    waited_for.asyncOp = False
    if dist.get_rank() == 0:
        with pytest.raises(BrokenGroupError, match="destroyed"):
            interrupted(
                lambda *_: dist.destroy_process_group(group),
                lambda: group.barrier(waited_for),
            )
        assert left_behind() < before
        with pytest.raises((BrokenGroupError, ValueError)):
            dist.all_reduce(torch.ones(3), group=group)
    dist.barrier()
    if dist.get_rank() == 1:
        with pytest.raises(DistributedError):  # that it is lost, or what it last called
            dist.all_reduce(torch.ones(3), group=group)


@pytest.mark.on_ranks(2)
def test_a_collective_in_a_signal_s_handler_is_refused_amid_another():
    group, seen = dist.new_group(backend="shm"), []

    def handler(*_):
        with pytest.raises(NotSupportedError, match="which a signal interrupted"):
            dist.all_reduce(torch.ones(3), group=group)
        seen.append(True)

    x = torch.ones(3)
    if dist.get_rank() == 0:
        interrupted(handler, lambda: dist.all_reduce(x, group=group))
        dist.barrier()
        assert seen
    else:
        time.sleep(1)
        dist.all_reduce(x, group=group)
        dist.barrier()
    assert x.tolist() == [2.0] * 3
    assert all_reduce(x, group=group).tolist() == [4.0] * 3  # its number is the same on both ranks


@pytest.mark.on_ranks(2)
def test_submitting_while_a_group_is_destroyed_ends():
    """Operations of another thread end, well or not, whenever the group goes."""
    for attempt in range(10):
        group, started, works = dist.new_group(backend="shm"), threading.Event(), []
        # not by torch's own object, which must not be used while another thread destroys it
        member = shm_backend_of(group)

        def submit(member=member, works=works, started=started):
            while True:
                try:
                    works.append(member.allreduce([torch.ones(3)]))
                except (RuntimeError, ValueError):
                    return
                started.set()

        thread = threading.Thread(target=submit)
        thread.start()
        started.wait(SOON_S)
        time.sleep(0.001 * attempt)
        dist.destroy_process_group(group)
        thread.join(SOON_S)
        assert not thread.is_alive()
        for work in works:
            try:
                work.wait()
            except RuntimeError:
                continue


@pytest.mark.on_ranks(2)
def test_memory_of_shared_tensors_is_freed():
    dist.barrier()
    for _ in range(20):  # 20 times 64 MiB: the host would not have them all at the same time
        x = gradwire.shm.empty(16 << 20).fill_(1)
        dist.all_reduce(x[:10])
        del x
    dist.barrier()
    held = [
        os.stat(f"/proc/self/fd/{fd}").st_blocks * 512
        for fd in os.listdir("/proc/self/fd")
        if os.path.exists(f"/proc/self/fd/{fd}")
        and os.readlink(f"/proc/self/fd/{fd}").startswith("/memfd:gradwire")
    ]
    assert max(held) < 200 << 20


@pytest.mark.on_ranks(2)
def test_too_many_descriptors_in_flight_are_waited_for():
    """A message whose descriptor the kernel does not take at once is late; no rank is lost."""
    group, x = dist.group.WORLD, torch.ones(100_000)
    if dist.get_rank() == 0:
        links = shm_backend_of(group).state.links
        socket, refusals = links._peers[1], [1, 2, 3]

        class Reluctant:
            def sendmsg(self, *args):
                if refusals and args[1]:
                    refusals.pop()
                    raise OSError(errno.ETOOMANYREFS, os.strerror(errno.ETOOMANYREFS))
                return socket.sendmsg(*args)

        links._peers[1] = Reluctant()
        dist.send(x * 3, 1)
        links._peers[1] = socket
        assert not refusals
    else:
        dist.recv(x, 0)
        assert x.eq(3).all()


@pytest.mark.on_ranks(2)
def test_writes_of_a_forked_child_are_private():
    x = gradwire.shm.empty(5000).fill_(7)
    dist.all_reduce(x)
    child = os.fork()
    if child == 0:
        right = bool(x.eq(14).all())
        x.zero_()
        os._exit(0 if right and bool(x.eq(0).all()) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert x.eq(14).all()
    dist.all_reduce(x)
    assert x.eq(28).all()
