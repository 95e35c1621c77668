"""What an epoch's group leaves behind when it fails."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import Work

from gradwire import elastic
from gradwire.elastic.groups import _in_thread
from gradwire.elastic.waiting import make_wait
from gradwire.errors import PeerLostError


class Held:
    """Stands for a group, or a connection to the store."""


class FailingWork(Work):
    """A collective that a lost member ends."""

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        raise RuntimeError("connection closed by peer")

    def is_completed(self) -> bool:
        return True


@pytest.fixture
def without_collection() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


def form(found: list[weakref.ref[Held]]) -> None:
    held = Held()
    found.append(weakref.ref(held))
    _in_thread(lambda: fail(held), lambda: None, lambda: None)


def collective(found: list[weakref.ref[Held]]) -> None:
    held = Held()
    found.append(weakref.ref(held))
    make_wait(lambda: None, 5.0)(FailingWork())


def step(found: list[weakref.ref[Held]]) -> None:
    run = elastic.join(dist.HashStore())
    run.keep(model=(model := nn.Linear(1, 1)))
    for step in run.steps(1):
        with step:
            for _ in step.shards:
                step.backward(model(torch.ones(1, 1)).sum())
            if not found:
                lose(found)
            step.commit()
    raise PeerLostError("as the others do")


def lose(found: list[weakref.ref[Held]]) -> None:
    held = Held()
    found.append(weakref.ref(held))
    try:
        fail(held)
    except RuntimeError as error:
        cause = error
    lost = PeerLostError("as gradwire.ddp raises it")
    raise lost from cause


def fail(held: Held) -> None:
    raise RuntimeError(f"{held} could not be formed")


@pytest.mark.parametrize("operation", [form, collective, step])
@pytest.mark.usefixtures("without_collection")
def test_an_error_keeps_nothing_alive(
    operation: Callable[[list[weakref.ref[Held]]], None],
) -> None:
    found: list[weakref.ref[Held]] = []
    try:
        operation(found)
    except PeerLostError:
        pass
    else:
        pytest.fail("no error")
    assert found[0]() is None
