"""Messages between two ranks of shm: orders, sizes, a full ring, interruptions, deaths."""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
import time
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from gradwire._torch import PYTHON_BACKENDS, is_done
from gradwire.errors import (
    BrokenGroupError,
    CollectiveTimeoutError,
    DistributedError,
    NotSupportedError,
    PeerLostError,
)
from gradwire.shm import arrivals, message_ring, point_to_point, process_group, segment
from gradwire.shm.arrivals import Mailbox
from gradwire.shm.incoming import Incoming
from gradwire.shm.message_ring import RING_BYTES, SLOT_BYTES, MessageRing
from gradwire.shm.register import shm_backend_of
from gradwire.testing import run_ranks

SIZES = (0, 1, 7, 1000, SLOT_BYTES - 1, SLOT_BYTES, SLOT_BYTES + 1, RING_BYTES, 3 * RING_BYTES + 5)
DTYPES = (torch.uint8, torch.float32, torch.complex64, torch.bool, torch.bfloat16)


class Interruption(Exception):
    """Raised by a signal's handler."""


def on_ranks(function, world=2, **options):
    return run_ranks(function, world, backend="shm", timeout=20, **options)


def content(number: int, nbytes: int, dtype: torch.dtype) -> torch.Tensor:
    whole = nbytes // dtype.itemsize * dtype.itemsize
    data = torch.arange(number, number + whole, dtype=torch.int64).remainder(251).to(torch.uint8)
    return data.bool() if dtype == torch.bool else data.view(dtype)


def same_bits(x: torch.Tensor, y: torch.Tensor) -> bool:
    return x.dtype == y.dtype and torch.equal(x.view(torch.uint8), y.view(torch.uint8))


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


def random_messages(seed):
    """All send what the seed says; receives are posted and waited for in any order that fits."""
    rank, world, rng = dist.get_rank(), dist.get_world_size(), random.Random(seed)
    plan = [
        (i, *rng.sample(range(world), 2), rng.randrange(3), rng.choice(SIZES), rng.choice(DTYPES))
        for i in range(30)
    ]
    own = random.Random(1000 * seed + rank)
    sends = [m for m in plan if m[1] == rank]
    receives = [m for m in plan if m[2] == rank]
    own.shuffle(receives)
    for source in range(world):
        for tag in range(3):  # of one source and tag in the order of sending
            places = [i for i, m in enumerate(receives) if (m[1], m[3]) == (source, tag)]
            for place, m in zip(places, sorted(receives[i] for i in places), strict=True):
                receives[place] = m
    waiting = []
    while sends or receives or waiting:
        what = own.choice(
            [
                w
                for w in ("send", "receive", "wait")
                if (sends, receives, waiting)[("send", "receive", "wait").index(w)]
            ]
        )
        if what == "send":
            number, _, to, tag, nbytes, dtype = sends.pop(0)
            dist.isend(content(number, nbytes, dtype), to, tag=tag)
        elif what == "receive":
            m = receives.pop(0)
            expected = content(m[0], m[4], m[5])
            x = torch.empty_like(expected)
            if x.numel() % 2 == 0 and own.random() < 0.3:
                x = torch.empty(2, x.numel() // 2, dtype=x.dtype).t()  # not contiguous
                expected = expected.view(x.shape)
            waiting.append((dist.irecv(x, m[1], tag=m[3]), x, expected))
        elif not sends:  # or ranks would wait for what is sent after
            work, x, expected = waiting.pop(own.randrange(len(waiting)))
            if own.random() < 0.2:
                time.sleep(0.002)
            if not receives:
                work.wait()
            elif not work.is_completed():
                waiting.append((work, x, expected))
                continue
            assert same_bits(x.contiguous(), expected.contiguous())


@pytest.mark.narrow({"seed": [0, 1, 2]}, {"seed": 3, "world": 3})
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("seed", range(20))
def test_random_messages(seed, world):
    on_ranks(random_messages, world, args=(seed,))


def both_send_first():
    peer = 1 - dist.get_rank()
    xs = [torch.full((RING_BYTES,), i, dtype=torch.uint8) for i in range(4)]
    for x in xs:
        dist.send(x, peer)
    for x in xs:
        y = torch.empty_like(x)
        dist.recv(y, peer)
        assert y.equal(x)


def test_a_send_waits_for_no_receive():
    on_ranks(both_send_first)


# -- a full ring -----------------------------------------------------------------------------


def to_a_busy_receiver(sizes):
    """Nobody empties the ring: the rest goes over the connection, and the order stays."""
    store = store_of_the_group()
    if dist.get_rank() == 0:
        dist.send(torch.zeros(1), 1)  # makes the ring
        store.wait(["busy"], timedelta(seconds=20))
        rests, send_rest = [], message_ring.Outgoing._send_rest

        def counted(*arguments):
            rests.append(arguments)
            send_rest(*arguments)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(message_ring.Outgoing, "_send_rest", counted)
            for number, nbytes in enumerate(sizes):
                dist.send(content(number, nbytes, torch.uint8), 1)
        store.set("sent", "")
        dist.send(content(99, 5, torch.uint8), 1)
        return len(rests)
    dist.recv(torch.zeros(1), 0)
    with taking_nothing(0):
        store.set("busy", "")
        store.wait(["sent"], timedelta(seconds=20))
    for number, nbytes in [*enumerate(sizes), (99, 5)]:
        expected = content(number, nbytes, torch.uint8)
        x = torch.empty_like(expected)
        dist.recv(x, 0)
        assert x.equal(expected)
    return None


@pytest.mark.parametrize(
    ("sizes", "rests"),
    [
        ([3 * RING_BYTES, 10], 2),
        ([1] * 12, 4),
        ([SLOT_BYTES] * 7 + [2 * SLOT_BYTES, 0, 20_000], 3),
        ([20_000] * 30, 22),
    ],
)
def test_messages_larger_than_the_ring(sizes, rests):
    assert on_ranks(to_a_busy_receiver, args=(sizes,))[0] == rests


# -- interruptions ---------------------------------------------------------------------------


def interrupted_receives(count):
    """Each message arrives once, whole; or, if copying was interrupted, an error says so."""
    if dist.get_rank() == 0:
        for number in range(count):
            with suppress(PeerLostError):  # at the end, if the receiver has left
                dist.send(content(number, 5 * SLOT_BYTES + number, torch.uint8), 1)
        return ""
    waiting = False

    def interrupt(*_):
        if waiting:
            raise Interruption

    signal.signal(signal.SIGALRM, interrupt)
    for number in range(count):
        expected = content(number, 5 * SLOT_BYTES + number, torch.uint8)
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
    ended = on_ranks(interrupted_receives, args=(60,))[1]
    assert not ended or "could not be handled (Interruption" in ended


def ready_messages():
    """What is there is taken at once, unless something that came before it fits."""
    x = torch.tensor(-1)
    if dist.get_rank() == 0:
        dist.send(x, 1)  # the receiver finds the ring
    else:
        dist.recv(x, 0)
    return [in_order(), in_order()]


def in_order():
    """What came, and the tags of the receives that were posted."""
    dist.barrier()
    if dist.get_rank() == 0:
        for number, tag in enumerate([1, 2, 1, 2, 3]):
            dist.send(torch.tensor(number), 1, tag=tag)
        dist.barrier()
        return [], []
    dist.barrier()
    x, posts, post = torch.tensor(-1), [], Mailbox.post
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Mailbox, "post", lambda box, r: posts.append(r.tag) or post(box, r))
        received = []
        for tag in (1, 1, 2, 2, 3):
            dist.recv(x, 0, tag=tag)
            received.append(x.item())
    return received, posts


def test_messages_are_received_in_order():
    received, posted = zip(*on_ranks(ready_messages)[1], strict=True)
    # tag 2 of the second message is kept while the third is taken; the fourth follows it
    assert received == ([0, 2, 1, 3, 4],) * 2
    # the first time, the links' thread may be about to look, as it was woken
    assert posted[1] == [1, 2]


def interrupted_send(at):
    """It is sent all the same, and so is what comes after it."""
    sizes = [10, 5 * SLOT_BYTES, 10, 3 * RING_BYTES]
    if dist.get_rank() == 0:
        dist.send(content(0, sizes[0], torch.uint8), 1)
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
                dist.send(content(1, sizes[1], torch.uint8), 1)
        finally:
            MessageRing.put = put
        for number in (2, 3):
            dist.send(content(number, sizes[number], torch.uint8), 1)
    else:
        for number, nbytes in enumerate(sizes):
            expected = content(number, nbytes, torch.uint8)
            x = torch.empty_like(expected)
            dist.recv(x, 0)
            assert x.equal(expected)
    dist.barrier()


def interrupted_waits(count):
    """An exception while it waits for a slot loses nothing."""
    if dist.get_rank() == 0:
        dist.send(torch.zeros(1), 1)
        for number in range(count):
            store_of_the_group().wait([f"waiting {number}"], timedelta(seconds=20))
            dist.send(content(number, 3 * SLOT_BYTES, torch.uint8), 1)
        return
    dist.recv(torch.zeros(1), 0)
    wait, told = MessageRing.wait, []

    def interrupted(ring, seconds):
        wait(ring, 1e-4 if told else seconds)
        number = len(told)
        if number % 2 == 0:
            told.append(1)
            raise Interruption
        told.append(1)

    expected = content(0, 0, torch.uint8)
    for number in range(count):
        expected = content(number, 3 * SLOT_BYTES, torch.uint8)
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
    return


def test_interrupted_waits_lose_nothing():
    on_ranks(interrupted_waits, args=(20,))


@pytest.mark.parametrize("at", [1, 2, 3, 5])
def test_an_interrupted_send(at):
    on_ranks(interrupted_send, args=(at,))


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


def told_after(what):
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


@pytest.mark.wide
@pytest.mark.parametrize("what", [at_the_end_of_a_wait, amid_a_look, as_nobody_wants])
def test_signal_handlers_make_no_receive_miss_its_message(what):
    on_ranks(told_after, args=(what,))


def in_a_handler():
    """A handler that sends amid a send, and one that receives amid a receive."""
    peer = 1 - dist.get_rank()
    dist.send(torch.zeros(1), peer)
    dist.recv(torch.empty(1), peer)
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


def test_a_signal_s_handler_amid_a_message():
    on_ranks(in_a_handler)


# -- deaths and mistakes ---------------------------------------------------------------------


def dies_amid_a_message():
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
    store = store_of_the_group()
    store.set("there", "")
    x = torch.empty(SLOT_BYTES)
    begun = time.monotonic()
    y = torch.empty(5)
    dist.recv(y, 1)
    with pytest.raises(PeerLostError, match="rank 1 died"):
        dist.recv(x, 1)
    with pytest.raises(PeerLostError, match="rank 1 died"):
        dist.recv(x, 1)
    assert time.monotonic() - begun < 20
    return y.tolist()


def test_a_sender_that_dies_amid_a_message():
    assert on_ranks(dies_amid_a_message, may_die=[1])[0] == [0, 1, 2, 3, 4]


def leaves_after_messages():
    """The one that is waited for comes with the sender's end; the one after it counts, too."""
    group, store = dist.new_group(backend="shm"), store_of_the_group()
    if dist.get_rank() == 1:
        dist.send(torch.zeros(1), 0, group=group)
        store.wait(["waits"], timedelta(seconds=20))
        for tag in (1, 2):
            dist.send(torch.full((1,), float(tag)), 0, group=group, tag=tag)
        shm_backend_of(group).shutdown()
        return []
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
    return [first.item(), second.item()]


@pytest.mark.wide
def test_all_messages_sent_before_leaving_arrive():
    assert on_ranks(leaves_after_messages)[0] == [1, 2]


def received_from_any_rank_as_all_leave():
    """Rank 2's message is in its ring, and this rank has not looked for it since all have left."""
    group, store = dist.new_group(backend="shm"), store_of_the_group()
    rank, x = dist.get_rank(), torch.full((1,), float(dist.get_rank()))
    if rank > 0:
        dist.send(x, 0, group=group)
        store.wait(["known"], timedelta(seconds=20))
        if rank == 2:
            dist.send(x * 10, 0, group=group)
        shm_backend_of(group).shutdown()
        return None
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
    return x.item()


@pytest.mark.wide
def test_a_receive_from_any_rank_takes_the_last_message_of_all():
    assert on_ranks(received_from_any_rank_as_all_leave, 3)[0] == 20


def times_out_amid_a_message():
    """Another receive gets the message: nothing writes to the first one's tensor any more."""
    store = store_of_the_group()
    peer = 1 - dist.get_rank()
    dist.send(torch.zeros(1), peer)
    dist.recv(torch.empty(1), peer)
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
def test_a_time_limit_that_is_over_amid_a_message():
    on_ranks(times_out_amid_a_message)


def given_up(src):
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
        return x.item(), y.item()
    dist.recv(torch.zeros(1), 0)
    dist.send(torch.ones(1), 0)
    return None


@pytest.mark.wide
@pytest.mark.parametrize("src", [None, 1])
def test_a_receive_that_was_given_up_is_waited_for_again(src):
    assert on_ranks(given_up, args=(src,))[0] == (0, 1)


def waited_for_with_no_time():
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


@pytest.mark.wide
def test_a_message_that_has_arrived_counts_whatever_the_time_limit():
    on_ranks(waited_for_with_no_time)


def nonsense(fields):
    """What a peer wrote is checked before it is used."""
    peer = 1 - dist.get_rank()
    dist.send(torch.zeros(1), peer)
    dist.recv(torch.empty(1), peer)
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
        return None
    with pytest.raises(DistributedError) as caught:
        dist.recv(torch.zeros(10), 0)
    return str(caught.value)


@pytest.mark.parametrize(
    "fields",
    [{"dtype": 99}, {"offset": 4}, {"offset": -4}, {"nbytes": 44}, {"elements": -1}],
    ids=str,
)
def test_invalid_fragments_are_refused(fields):
    assert "rank 0 sent" in on_ranks(nonsense, args=(fields,))[1]


def test_patience_is_longer_than_python_s_switch_of_threads():
    assert message_ring._PATIENCE > 0.005


# -- what must not make a receiver wait --------------------------------------------------------


def exchange_first():
    """Makes the rings; returns the peer's rank."""
    peer = 1 - dist.get_rank()
    dist.send(torch.zeros(1), peer)
    dist.recv(torch.empty(1), peer)
    return peer


def huge():
    exchange_first()
    if dist.get_rank() == 0:
        put = MessageRing.put
        MessageRing.put = lambda ring, head, at: put(ring, head._replace(elements=1 << 60), at)
        dist.send(torch.zeros(10), 1)
        MessageRing.put = put
        return None
    x = torch.zeros(10)
    errors = []
    for work in [dist.irecv(x, 0), dist.irecv(x, 0)]:
        with pytest.raises(DistributedError) as caught:
            work.wait(timedelta(seconds=3))
        errors.append(str(caught.value))
    return errors


def test_no_memory_for_a_message_ends_its_receive():
    assert all("no memory for a message" in text for text in on_ranks(huge)[1])


def rest_without_memory():
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


def test_a_rest_for_which_the_sender_has_no_memory():
    on_ranks(rest_without_memory)


def sends_to_a_stuck_receiver():
    """The seconds for which a slot was waited for in vain, where that was not 0."""
    exchange_first()
    store = store_of_the_group()
    if dist.get_rank() == 0:
        store.wait(["busy"], timedelta(seconds=20))
        waits, acquire = [], MessageRing.acquire

        def noted(ring, seconds):
            acquired = acquire(ring, seconds)
            if seconds and not acquired:
                waits.append(seconds)
            return acquired

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(MessageRing, "acquire", noted)
            for _ in range(50):
                dist.send(torch.zeros(1), 1)
        store.set("tried", "")
        return waits
    with taking_nothing(0):
        store.set("busy", "")
        store.wait(["tried"], timedelta(seconds=20))
    for _ in range(50):
        dist.recv(torch.zeros(1), 0)
    return []


def test_the_patience_is_not_for_each_message():
    waits = on_ranks(sends_to_a_stuck_receiver)[0]
    assert waits == [message_ring._GLANCE, message_ring._PATIENCE]


def aborted_before_it_is_posted(src):
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


@pytest.mark.parametrize("src", [None, 1])
def test_a_receive_that_is_posted_as_the_group_is_aborted(src):
    on_ranks(aborted_before_it_is_posted, args=(src,))


def sends_while_a_ring_is_made():
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
        return None
    values = torch.zeros(2 if dist.get_rank() == 1 else 1)
    for value in values.split(1):
        dist.recv(value, 0)
    return values.tolist()


def test_a_send_amid_the_making_of_a_ring():
    assert on_ranks(sends_while_a_ring_is_made, 3)[1:] == [[8, 1], [9]]


def incoming_when_reading_begins():
    """Whether each peer has its `Incoming` when the links' thread may call it."""
    state_of, seen, made = process_group.SharedMemory, [], []

    def make(*arguments):
        made.append(state_of(*arguments))
        seen.append(made[0].links._thread.is_alive())
        return made[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process_group, "SharedMemory", make)
        group = dist.new_group([0, 1])
    dist.barrier(group=group)
    return seen, made[0].links._thread.is_alive()


def test_nothing_is_read_before_the_group_is_formed():
    """A peer's first message finds who takes it."""
    assert on_ranks(incoming_when_reading_begins) == [([False], True)] * 2


def memory_of_ended_groups():
    """Shared memory and descriptors of it, without any collection of garbage."""

    def held():
        names = [
            os.readlink(entry.path) for entry in os.scandir("/proc/self/fd") if entry.is_symlink()
        ]
        return sum("memfd" in n for n in names), Path("/proc/self/maps").read_text().count("memfd")

    gc.collect()
    gc.disable()
    counts = []
    try:
        for _ in range(3):
            group, peer = dist.new_group(backend="shm"), 1 - dist.get_rank()
            work = dist.irecv(torch.zeros(1), peer, group=group)
            dist.send(torch.ones(1), peer, group=group)
            work.wait()
            dist.barrier()
            dist.destroy_process_group(group)
            del group, work
            dist.barrier()
            counts.append(held())
    finally:
        gc.enable()
    return counts


def test_rings_end_with_their_group():
    for counts in run_ranks(memory_of_ended_groups, 2, backend="gloo", timeout=60):
        assert len(set(counts)) == 1, counts


def polled_between_hosts():
    """Poll for a message to another host without waiting for it."""
    rank, x = dist.get_rank(), torch.zeros(1000)
    if rank == 1:
        return 0.0
    work = dist.isend(torch.ones(1000), 2) if rank == 0 else dist.irecv(x, 0)
    # torch's own groups hide is_completed of a handle from a backend in Python
    is_done = work.get_future().done if PYTHON_BACKENDS else work.is_completed
    deadline = time.monotonic() + 20
    while not is_done():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    work.wait()
    return x.sum().item()


def test_a_message_between_hosts_is_completed_without_a_wait():
    assert run_ranks(polled_between_hosts, 3, backend="shm", hosts=(2, 1))[2] == 1000
