"""Random messages: sizes around the limits, tags, and all kinds of waits."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from gradwire._torch import is_done
from gradwire.shm.message_ring import SLOT_BYTES, SLOTS
from gradwire.testing import run_ranks

SHORT = (0, 1, 7, 1000, SLOT_BYTES - 1)
LONG = (SLOT_BYTES, SLOT_BYTES + 1, 3 * SLOT_BYTES + 5, (SLOTS + 1) * SLOT_BYTES)
DTYPES = (torch.uint8, torch.float32, torch.complex64, torch.bool, torch.bfloat16)
LIMIT = timedelta(seconds=30)


class Sent(NamedTuple):
    number: int
    source: int
    target: int
    tag: int
    nbytes: int

    def data(self) -> Tensor:
        """Of every dtype; each third message is a transposed matrix, if it has an even size."""
        dtype = DTYPES[self.number % len(DTYPES)]
        whole = self.nbytes // dtype.itemsize * dtype.itemsize
        data = ((torch.arange(whole) + 1) * (self.number + 3) % 251).to(torch.uint8)
        x = data.bool() if dtype == torch.bool else data.view(dtype)
        return x.view(2, -1).t() if self.number % 3 == 0 and len(x) % 2 == 0 else x


def planned(seed: int, world: int) -> list[Sent]:
    draw = random.Random(seed)
    messages = []
    for number in range(draw.randrange(20, 80)):
        source, target = draw.sample(range(world), 2)
        nbytes = draw.choice(LONG if draw.random() < 0.1 else SHORT)
        messages.append(Sent(number, source, target, draw.randrange(3), nbytes))
    return messages


def wait_by_polls(work: dist.Work) -> None:
    end = time.monotonic() + LIMIT.total_seconds()
    while not is_done(work):
        assert time.monotonic() < end


def wait_by_future(work: dist.Work) -> None:
    done = threading.Event()
    work.get_future().then(lambda _: done.set())
    assert done.wait(LIMIT.total_seconds())


def received(draw: random.Random, message: Sent) -> Callable[[], None]:
    """Receive a message at once or later; returns what has to be called at the end."""
    expected = message.data()
    x = torch.empty_like(expected).fill_(1)

    def check(wait: Callable[[], object] = bool) -> None:
        wait()
        got, wanted = (each.contiguous().view(torch.uint8) for each in (x, expected))
        assert torch.equal(got, wanted), message

    how = draw.choice(["recv", "recv", "poll", "future", "later", "thread"])
    if how == "recv":
        check(lambda: dist.recv(x, message.source, tag=message.tag))
        return bool
    work = dist.irecv(x, message.source, tag=message.tag)
    assert work is not None
    if how == "later":
        return lambda: check(lambda: work.wait(LIMIT))
    if how == "thread":
        thread = threading.Thread(target=work.wait, args=(LIMIT,))
        thread.start()
        return lambda: check(thread.join)
    check(lambda: (wait_by_polls if how == "poll" else wait_by_future)(work))
    return bool


def exchange(seed: int) -> None:
    rank = dist.get_rank()
    messages = planned(seed, dist.get_world_size())
    draw = random.Random(f"{seed} {rank}")
    failed = []

    def send() -> None:
        try:
            for message in messages:
                if message.source == rank:
                    dist.send(message.data(), message.target, tag=message.tag)
        except Exception as error:
            failed.append(error)

    sending = threading.Thread(target=send)
    sending.start()
    waiting: dict[tuple[int, int], list[Sent]] = {}
    for message in messages:
        if message.target == rank:
            waiting.setdefault((message.source, message.tag), []).append(message)
    at_the_end = []
    while waiting:
        key = draw.choice(list(waiting))
        at_the_end.append(received(draw, waiting[key].pop(0)))
        if not waiting[key]:
            del waiting[key]
    draw.shuffle(at_the_end)
    for end in at_the_end:
        end()
    sending.join(LIMIT.total_seconds())
    assert not sending.is_alive()
    assert not failed


def exchange_all(seeds: range) -> None:
    for seed in seeds:
        exchange(seed)


def test_any_traffic_arrives():
    run_ranks(exchange_all, 2, backend="shm", timeout=60, args=(range(5),))


@pytest.mark.wide
@pytest.mark.parametrize("world", [2, 3, 5])
def test_much_traffic_arrives(world):
    run_ranks(exchange_all, world, backend="shm", timeout=100, args=(range(40),))
