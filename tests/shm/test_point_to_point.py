"""Messages between two ranks of shm: orders, sizes, a full ring, interruptions, deaths."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from contextlib import contextmanager, suppress
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from gradwire._processes import wait_until
from gradwire._torch import PYTHON_BACKENDS, is_done
from gradwire.errors import (
    CollectiveTimeoutError,
    DistributedError,
    NotSupportedError,
    PeerLostError,
)
from gradwire.shm import arrivals, message_ring
from gradwire.shm.message_ring import RING_BYTES, SLOT_BYTES, MessageRing
from gradwire.shm.register import shm_backend_of
from gradwire.testing import run_ranks


class Interruption(Exception):
    """Raised by a signal's handler."""


def content(number: int, nbytes: int) -> torch.Tensor:
    data = torch.arange(number, number + nbytes, dtype=torch.int64)
    return data.remainder(251).to(torch.uint8)


def store_of_the_group():
    return dist.distributed_c10d._get_default_store()


@contextmanager
def taking_nothing(source):
    """Whatever this rank is sent by `source` meanwhile stays in the ring, and with the links."""
    incoming, turn = (
        shm_backend_of(dist.group.WORLD).messages.incoming[source],
        threading.Lock(),
    )
    with turn:
        while not incoming._enter(turn):  # the links' thread looks, for a moment
            time.sleep(0.001)
        yield


# -- orders ----------------------------------------------------------------------------------


@pytest.mark.on_ranks(2)
def test_a_send_waits_for_no_receive():
    peer = 1 - dist.get_rank()
    xs = [torch.full((RING_BYTES,), i, dtype=torch.uint8) for i in range(4)]
    for x in xs:
        dist.send(x, peer)
    for x in xs:
        y = torch.empty_like(x)
        dist.recv(y, peer)
        assert y.equal(x)


# -- a full ring -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "rests"),
    [
        ([3 * RING_BYTES, 10], 2),
        ([1] * 12, 4),
        ([SLOT_BYTES] * 7 + [2 * SLOT_BYTES, 0, 20_000], 3),
        ([20_000] * 30, 22),
    ],
)
@pytest.mark.on_ranks(2)
def test_messages_larger_than_the_ring(sizes, rests):
    """Nobody empties the ring: the rest goes over the connection, and the order stays."""
    store = store_of_the_group()
    if dist.get_rank() == 0:
        dist.send(torch.zeros(1), 1)  # makes the ring
        store.wait(["busy"], timedelta(seconds=20))
        sent, send_rest = [], message_ring.Outgoing._send_rest

        def counted(*arguments):
            sent.append(arguments)
            send_rest(*arguments)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(message_ring.Outgoing, "_send_rest", counted)
            for number, nbytes in enumerate(sizes):
                dist.send(content(number, nbytes), 1)
        store.set("sent", "")
        dist.send(content(99, 5), 1)
        assert len(sent) == rests
        return
    dist.recv(torch.zeros(1), 0)
    with taking_nothing(0):
        store.set("busy", "")
        store.wait(["sent"], timedelta(seconds=20))
    for number, nbytes in [*enumerate(sizes), (99, 5)]:
        expected = content(number, nbytes)
        x = torch.empty_like(expected)
        dist.recv(x, 0)
        assert x.equal(expected)


# -- interruptions ---------------------------------------------------------------------------


def interrupted_receives(count):
    """Each message arrives once, whole; or, if copying was interrupted, an error says so.

    Half of the handlers raise; the others post a receive, whose message comes as well.
    """
    if dist.get_rank() == 0:
        for number in range(count):
            with suppress(PeerLostError):  # at the end, if the receiver has left
                dist.send(content(number, 5 * SLOT_BYTES + number), 1)
                dist.send(torch.ones(1), 1, tag=1)
        return ""
    waiting, posted = False, []

    def interrupt(*_):
        if waiting and random.random() < 0.5:
            raise Interruption
        if len(posted) < count:
            posted.append(dist.irecv(torch.zeros(1), 0, tag=1))

    signal.signal(signal.SIGALRM, interrupt)
    for number in range(count):
        expected = content(number, 5 * SLOT_BYTES + number)
        x = torch.empty_like(expected)
        work = dist.irecv(x, 0)
        arrived = False
        while not arrived:
            signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-5, 2e-3))
            with suppress(Interruption):
                waiting = True
                try:
                    work.wait()
                except DistributedError as error:
                    waiting = False
                    return str(error)
                waiting = False
                arrived = True
            waiting = False
        assert x.equal(expected)
    signal.setitimer(signal.ITIMER_REAL, 0)
    for work in posted:
        work.wait(timedelta(seconds=5))
    return ""


def test_interrupted_receives_lose_nothing_silently():
    ended = run_ranks(interrupted_receives, backend="shm", args=(60,), timeout=20)[1]
    assert not ended or "could not be handled (Interruption" in ended


@pytest.mark.parametrize("at", [1, 2, 3, 5])
@pytest.mark.on_ranks(2)
def test_an_interrupted_send(at):
    """It is sent all the same, and so is what comes after it."""
    sizes = [10, 5 * SLOT_BYTES, 10, 3 * RING_BYTES]
    if dist.get_rank() == 0:
        dist.send(content(0, sizes[0]), 1)
        put, calls = MessageRing.put, []

        def interrupted(ring, head, source):
            calls.append(head)
            if len(calls) == at:
                if at % 2:
                    put(ring, head, source)
                raise Interruption
            return put(ring, head, source)

        MessageRing.put = interrupted
        try:
            with pytest.raises(Interruption):
                dist.send(content(1, sizes[1]), 1)
        finally:
            MessageRing.put = put
        for number in (2, 3):
            dist.send(content(number, sizes[number]), 1)
    else:
        for number, nbytes in enumerate(sizes):
            expected = content(number, nbytes)
            x = torch.empty_like(expected)
            dist.recv(x, 0)
            assert x.equal(expected)
    dist.barrier()


@pytest.mark.on_ranks(2)
def test_a_receive_that_another_thread_posts_amid_an_interrupted_look():
    """What it was asked to look for meanwhile is found."""
    exchange_first()
    dist.barrier()
    store = store_of_the_group()
    if dist.get_rank() == 0:
        store.wait(["wanted"], timedelta(seconds=20))
        dist.send(torch.zeros(1), 1, tag=2)
    else:
        incoming = shm_backend_of(dist.group.WORLD).messages.incoming[0]
        take_all, done = arrivals.Arrivals.take_all, threading.Event()
        future = dist.irecv(torch.zeros(1), 0, tag=2).get_future()

        def interrupted(*args):
            if threading.current_thread() is not threading.main_thread():
                return take_all(*args)
            arrivals.Arrivals.take_all = take_all
            store.set("wanted", "")
            while not incoming._again:  # as the links' thread was woken
                time.sleep(0.001)
            raise Interruption

        def poll_until_interrupted():
            while True:  # one returns at once while the links' thread looks
                incoming.poll()

        arrivals.Arrivals.take_all = interrupted
        with pytest.raises(Interruption):
            poll_until_interrupted()
        future.then(lambda _: done.set())
        assert done.wait(5)
    dist.barrier()


@pytest.mark.on_ranks(2)
def test_a_signal_s_handler_amid_a_message():
    """A handler that sends amid a send, and one that receives amid a receive."""
    exchange_first()
    if dist.get_rank() == 0:
        put, nested = MessageRing.put, []

        def amid(ring, head, source):
            if head.offset and not nested:
                nested.append(1)
                dist.send(torch.full((3,), 7.0), 1)
            return put(ring, head, source)

        MessageRing.put = amid
        dist.send(torch.ones(SLOT_BYTES), 1)
        MessageRing.put = put
        x = torch.empty(1)
        refused = []

        def receive(*_):
            with pytest.raises(NotSupportedError, match="another receive"):
                dist.recv(torch.empty(1), 1, tag=5)
            refused.append(1)
            dist.send(torch.zeros(1), 1)

        signal.signal(signal.SIGALRM, receive)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        dist.recv(x, 1)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        assert refused
    else:
        x, y = torch.empty(SLOT_BYTES), torch.empty(3)
        dist.recv(x, 0)
        dist.recv(y, 0)
        assert x.eq(1).all()
        assert y.eq(7).all()
        dist.recv(torch.empty(1), 0)  # only then
        dist.send(torch.zeros(1), 0)
    dist.barrier()


# -- deaths and mistakes ---------------------------------------------------------------------


@pytest.mark.on_ranks(2, may_die=[1])
def test_a_sender_that_dies_amid_a_message():
    if dist.get_rank() == 1:
        dist.send(torch.arange(5.0), 0)
        put, calls = MessageRing.put, []

        def third(ring, head, source):
            calls.append(head)
            if len(calls) == 3:
                os._exit(1)
            return put(ring, head, source)

        MessageRing.put = third
        dist.send(torch.ones(SLOT_BYTES), 0)
    x = torch.empty(SLOT_BYTES)
    begun = time.monotonic()
    y = torch.empty(5)
    dist.recv(y, 1)
    with pytest.raises(PeerLostError, match="rank 1 died"):
        dist.recv(x, 1)
    with pytest.raises(PeerLostError, match="rank 1 died"):
        dist.recv(x, 1)
    assert time.monotonic() - begun < 20
    assert y.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("src", [None, 1])
@pytest.mark.on_ranks(3)
def test_messages_that_were_sent_before_leaving_arrive(src):
    senders, rank = [src] if src else [1, 2], dist.get_rank()
    for _ in range(5):
        group, received = dist.new_group(backend="shm"), []
        for _ in range(3 * len(senders) if rank == 0 else 0):
            received.append(torch.zeros(40_000))
            dist.irecv(received[-1], src, group).wait()
        assert all(x.eq(x[0]).all() for x in received)
        assert rank or sorted(int(x[0]) for x in received) == sorted(3 * senders)
        for _ in range(3 if rank in senders else 0):
            dist.send(torch.full((40_000,), float(rank)), 0, group)
        dist.destroy_process_group(group)


@pytest.mark.wide
@pytest.mark.on_ranks(2)
def test_a_time_limit_that_is_over_amid_a_message():
    """Another receive gets the message: nothing writes to the first one's tensor any more."""
    store = store_of_the_group()
    exchange_first()
    if dist.get_rank() == 0:
        put = MessageRing.put

        def pauses(ring, head, source):
            if head.offset == SLOT_BYTES:
                store.set("half", "")
                store.wait(["given up"], timedelta(seconds=20))
            return put(ring, head, source)

        MessageRing.put = pauses
        store.wait(["posted"], timedelta(seconds=20))
        dist.send(torch.ones(SLOT_BYTES), 1)
        MessageRing.put = put
    else:
        x = torch.zeros(SLOT_BYTES)
        work = dist.irecv(x, 0)
        store.set("posted", "")
        store.wait(["half"], timedelta(seconds=20))
        with pytest.raises(CollectiveTimeoutError):
            work.wait(timedelta(milliseconds=50))
        x.fill_(5)
        store.set("given up", "")
        y = torch.zeros(SLOT_BYTES)
        dist.recv(y, 0)
        assert y.eq(1).all()
        assert x.eq(5).all()
        with pytest.raises(CollectiveTimeoutError):
            dist.irecv(x, 0).wait(timedelta(milliseconds=50))
    dist.barrier()


@pytest.mark.wide
@pytest.mark.parametrize("src", [None, 1])
@pytest.mark.on_ranks(2)
def test_a_receive_that_was_given_up_is_waited_for_again(src):
    """A receive whose time was over has ended: each wait says so, none waits for ever."""
    if dist.get_rank() == 0:
        x = torch.zeros(1)
        work = dist.irecv(x, src)
        future = work.get_future()
        for _ in range(2):
            with pytest.raises(CollectiveTimeoutError):
                work.wait(timedelta(milliseconds=20))
        with pytest.raises(RuntimeError, match="CollectiveTimeoutError"):
            future.wait()
        assert is_done(work)
        dist.send(torch.zeros(1), 1)
        y = torch.zeros(1)
        dist.irecv(y, src).wait()  # the first did not take its message
        assert (x.item(), y.item()) == (0, 1)
        return
    dist.recv(torch.zeros(1), 0)
    dist.send(torch.ones(1), 0)


@pytest.mark.parametrize(
    "fields",
    [{"dtype": 99}, {"offset": 4}, {"offset": -4}, {"nbytes": 44}, {"elements": -1}],
    ids=str,
)
@pytest.mark.on_ranks(2)
def test_invalid_fragments_are_refused(fields):
    """What a peer wrote is checked before it is used."""
    exchange_first()
    if dist.get_rank() == 0:
        pack = message_ring._HEAD.pack_into

        class Forged:
            size = message_ring._HEAD.size

            @staticmethod
            def pack_into(memory, at, *head):
                pack(memory, at, *message_ring.Head(*head)._replace(**fields))

        message_ring._HEAD, kept = Forged, message_ring._HEAD
        dist.send(torch.zeros(10), 1)
        message_ring._HEAD = kept
        return
    with pytest.raises(DistributedError, match="rank 0 sent"):
        dist.recv(torch.zeros(10), 0)


# -- what must not make a receiver wait --------------------------------------------------------


def exchange_first():
    """Makes the rings; returns the peer's rank."""
    peer = 1 - dist.get_rank()
    dist.send(torch.zeros(1), peer)
    dist.recv(torch.empty(1), peer)
    return peer


@pytest.mark.on_ranks(3, hosts=(2, 1))
def test_a_message_between_hosts_is_completed_without_a_wait():
    rank, x = dist.get_rank(), torch.zeros(1000)
    if rank == 1:
        return
    work = dist.isend(torch.ones(1000), 2) if rank == 0 else dist.irecv(x, 0)
    # torch's own groups hide is_completed of a handle from a backend in Python
    is_done = work.get_future().done if PYTHON_BACKENDS else work.is_completed
    assert wait_until(is_done, 20)
    work.wait()
    assert rank == 0 or x.sum() == 1000
