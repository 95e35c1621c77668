"""Messages between two ranks of shm: orders, sizes, a full ring, interruptions, deaths."""

from __future__ import annotations

import os
import random
import signal
import sys
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
    BrokenGroupError,
    CollectiveTimeoutError,
    DistributedError,
    NotSupportedError,
    PeerLostError,
)
from gradwire.shm import arrivals, message_ring, point_to_point, segment
from gradwire.shm.incoming import Incoming
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
    """Each message arrives once, whole; or, if copying was interrupted, an error says so."""
    if dist.get_rank() == 0:
        for number in range(count):
            with suppress(PeerLostError):  # at the end, if the receiver has left
                dist.send(content(number, 5 * SLOT_BYTES + number), 1)
        return ""
    waiting = False

    def interrupt(*_):
        if waiting:
            raise Interruption

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
def test_interrupted_waits_lose_nothing():
    """An exception while it waits for a slot loses nothing."""
    if dist.get_rank() == 0:
        dist.send(torch.zeros(1), 1)
        for number in range(20):
            store_of_the_group().wait([f"waiting {number}"], timedelta(seconds=20))
            dist.send(content(number, 3 * SLOT_BYTES), 1)
        return
    dist.recv(torch.zeros(1), 0)
    wait, told = MessageRing.wait, []

    def interrupted(ring, seconds):
        wait(ring, 1e-4 if told else seconds)
        told.append(1)
        if len(told) % 2:
            raise Interruption

    for number in range(20):
        expected = content(number, 3 * SLOT_BYTES)
        x = torch.empty_like(expected)
        work = dist.irecv(x, 0)
        MessageRing.wait = interrupted
        store_of_the_group().set(f"waiting {number}", "")
        arrived = False
        while not arrived:
            with suppress(Interruption):
                work.wait()
                arrived = True
        MessageRing.wait = wait
        assert x.equal(expected)


def at_the_end_of_a_wait(patch):
    """The sender goes on to tell: this rank does not seem to wait at the ring for ever."""
    stop = MessageRing.stop_listening

    def interrupted(ring):
        patch.setattr(MessageRing, "stop_listening", stop)
        raise Interruption

    patch.setattr(MessageRing, "seems_filled", lambda *_, **__: False)  # so that it waits
    for attempt in range(2):
        patch.setattr(MessageRing, "stop_listening", interrupted)
        try:
            dist.recv(torch.zeros(1), 0, tag=1)
        except Interruption:
            break
        # the links' thread, which was woken for an earlier message, has taken this one: once
        assert attempt == 0
        store_of_the_group().set("once more", "")
    future = dist.irecv(torch.zeros(1), 0, tag=2).get_future()
    store_of_the_group().set("wanted", "")
    return future


def amid_a_look(patch):
    """What another thread asked it to look for meanwhile is found."""
    incoming, take_all = (
        shm_backend_of(dist.group.WORLD).messages.incoming[0],
        arrivals.Arrivals.take_all,
    )
    future = dist.irecv(torch.zeros(1), 0, tag=2).get_future()

    def interrupted(*_):
        patch.setattr(arrivals.Arrivals, "take_all", take_all)
        store_of_the_group().set("wanted", "")
        while not incoming._again:  # as the links' thread was woken
            time.sleep(0.001)
        raise Interruption

    patch.setattr(arrivals.Arrivals, "take_all", interrupted)
    with pytest.raises(Interruption):
        incoming.poll()
    return future


def as_nobody_wants(patch):
    """A handler that wants a message just as this thread tells the sender that nobody does."""
    dist.recv(torch.zeros(1), 0, tag=1)
    want, futures = MessageRing.want, []

    def handled(ring, wanted):
        patch.setattr(MessageRing, "want", want)
        futures.append(dist.irecv(torch.zeros(1), 0, tag=2).get_future())
        want(ring, wanted)

    incoming = shm_backend_of(dist.group.WORLD).messages.incoming[0]
    patch.setattr(MessageRing, "want", handled)
    incoming.unwant(None)
    store_of_the_group().set("wanted", "")
    return futures[0]


@pytest.mark.wide
@pytest.mark.parametrize("what", [at_the_end_of_a_wait, amid_a_look, as_nobody_wants])
@pytest.mark.on_ranks(2)
def test_signal_handlers_make_no_receive_miss_its_message(what):
    exchange_first()
    dist.barrier()
    if dist.get_rank() == 0:
        store, requests = store_of_the_group(), ["once more"]
        dist.send(torch.zeros(1), 1, tag=1)
        deadline = time.monotonic() + 10
        while not store.check(["wanted"]) and time.monotonic() < deadline:
            if store.check(requests):
                requests = ["never"]
                dist.send(torch.zeros(1), 1, tag=1)
            time.sleep(0.001)
        dist.send(torch.zeros(1), 1, tag=2)
    else:
        with pytest.MonkeyPatch.context() as patch:
            future, done = what(patch), threading.Event()
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


@pytest.mark.wide
@pytest.mark.on_ranks(2)
def test_all_messages_sent_before_leaving_arrive():
    """The one that is waited for comes with the sender's end; the one after it counts, too."""
    group, store = dist.new_group(backend="shm"), store_of_the_group()
    if dist.get_rank() == 1:
        dist.send(torch.zeros(1), 0, group=group)
        store.wait(["waits"], timedelta(seconds=20))
        for tag in (1, 2):
            dist.send(torch.full((1,), float(tag)), 0, group=group, tag=tag)
        shm_backend_of(group).shutdown()
        return
    dist.recv(torch.zeros(1), 1, group=group)
    links, wait = shm_backend_of(group).state.links, MessageRing.wait

    def late(ring, seconds):
        store.set("waits", "")
        wait(ring, seconds)
        while 1 not in links.lost:
            time.sleep(0.001)

    first, second = torch.zeros(1), torch.zeros(1)
    works = [dist.irecv(first, 1, group=group, tag=1), dist.irecv(second, 1, group=group, tag=2)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MessageRing, "wait", late)
        works[0].wait()
    works[1].wait()
    assert [first.item(), second.item()] == [1, 2]


@pytest.mark.wide
@pytest.mark.on_ranks(3)
def test_a_receive_from_any_rank_takes_the_last_message_of_all():
    """Rank 2's message is in its ring, and this rank has not looked for it since all have left."""
    group, store = dist.new_group(backend="shm"), store_of_the_group()
    rank, x = dist.get_rank(), torch.full((1,), float(dist.get_rank()))
    if rank > 0:
        dist.send(x, 0, group=group)
        store.wait(["known"], timedelta(seconds=20))
        if rank == 2:
            dist.send(x * 10, 0, group=group)
        shm_backend_of(group).shutdown()
        return
    for source in (1, 2):
        dist.recv(x, source, group=group)
    links, look = shm_backend_of(group).state.links, Incoming.poll
    looks = threading.Event()

    def late(incoming):
        if threading.current_thread() is links._thread and incoming._source == 2:
            looks.wait(10)
        look(incoming)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Incoming, "poll", late)
        store.set("known", "")
        while len(links.lost) < 2:
            time.sleep(0.001)
        dist.irecv(x, None, group=group).wait()
        looks.set()
    assert x.item() == 20


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


@pytest.mark.wide
@pytest.mark.on_ranks(2)
def test_a_message_that_has_arrived_counts_whatever_the_time_limit():
    peer = exchange_first()
    dist.barrier()  # nobody waits: what is sent from here on stays in the ring
    store = store_of_the_group()
    if dist.get_rank() == 0:
        dist.send(torch.ones(1), peer)
        store.set("sent", "")
        dist.barrier()
        return
    store.wait(["sent"], timedelta(seconds=20))
    x = torch.zeros(1)
    dist.irecv(x, peer).wait(timedelta(microseconds=1))
    assert x.item() == 1
    dist.barrier()


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


@pytest.mark.on_ranks(2)
def test_no_memory_for_a_message_ends_its_receive():
    exchange_first()
    if dist.get_rank() == 0:
        put = MessageRing.put
        MessageRing.put = lambda ring, head, at: put(ring, head._replace(elements=1 << 60), at)
        dist.send(torch.zeros(10), 1)
        MessageRing.put = put
        return
    x = torch.zeros(10)
    for work in [dist.irecv(x, 0), dist.irecv(x, 0)]:
        with pytest.raises(DistributedError, match="no memory for a message"):
            work.wait(timedelta(seconds=3))


@pytest.mark.on_ranks(2)
def test_a_rest_for_which_the_sender_has_no_memory():
    exchange_first()
    store = store_of_the_group()
    if dist.get_rank() == 0:

        def no_memory(size):
            raise DistributedError("not enough memory")

        store.wait(["busy"], timedelta(seconds=20))
        create, message_ring.segment.create = message_ring.segment.create, no_memory
        with pytest.raises(DistributedError, match="not enough memory"):
            dist.send(torch.zeros(RING_BYTES), 1)
        message_ring.segment.create = create
        store.set("tried", "")
        return
    with taking_nothing(0):
        store.set("busy", "")
        store.wait(["tried"], timedelta(seconds=20))
    with pytest.raises(DistributedError, match="not enough memory"):
        dist.irecv(torch.zeros(RING_BYTES), 0).wait(timedelta(seconds=3))


@pytest.mark.parametrize("src", [None, 1])
@pytest.mark.on_ranks(2)
def test_a_receive_that_is_posted_as_the_group_is_aborted(src):
    group = shm_backend_of(dist.group.WORLD)
    if dist.get_rank() == 1:
        store_of_the_group().wait(["over"], timedelta(seconds=20))
        return
    posted = point_to_point.PostedReceive

    def late(*fields):
        aborting = threading.Thread(target=group.abort)
        aborting.start()
        aborting.join()
        return posted(*fields)

    point_to_point.PostedReceive = late
    work = group.messages.receive(group, [torch.zeros(1)], src, 0)
    point_to_point.PostedReceive = posted
    with pytest.raises(BrokenGroupError):
        work.wait(timedelta(seconds=3))
    store_of_the_group().set("over", "")


@pytest.mark.on_ranks(3)
def test_a_send_amid_the_making_of_a_ring():
    """In a signal's handler, to the same rank and to another."""
    if dist.get_rank() == 0:
        map_for_user = segment.map_for_user

        def amid(*arguments):
            segment.map_for_user = map_for_user
            dist.send(torch.full((1,), 9.0), 2)
            dist.send(torch.full((1,), 8.0), 1)
            return map_for_user(*arguments)

        segment.map_for_user = amid
        dist.send(torch.ones(1), 1)
        return
    values = torch.zeros(2 if dist.get_rank() == 1 else 1)
    for value in values.split(1):
        dist.recv(value, 0)
    assert values.tolist() == ([8, 1] if dist.get_rank() == 1 else [9])


@pytest.mark.on_ranks(2)
def test_nothing_is_read_before_the_group_is_formed():
    """Each peer has its `Incoming` when the links' thread may call it."""
    register = sys.modules["gradwire.shm.register"]  # the package has a function of that name
    state_of, seen, made = register.SharedMemory, [], []

    def make(*arguments):
        made.append(state_of(*arguments))
        seen.append(made[0].links._thread.is_alive())
        return made[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(register, "SharedMemory", make)
        group = dist.new_group([0, 1])
    dist.barrier(group=group)
    assert seen == [False]
    assert made[0].links._thread.is_alive()


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
