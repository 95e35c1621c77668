"""What an epoch's group leaves behind when it fails."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
from torch.distributed import Work

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


def fail(held: Held) -> None:
    raise RuntimeError(f"{held} could not be formed")


@pytest.mark.parametrize("operation", [form, collective])
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
