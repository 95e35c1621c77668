"""Groups of generations: resources left after a failure, and destruction."""

from __future__ import annotations

import gc
import os
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import Work

from gradwire import _groups, elastic
from gradwire._groups import destroy_in_thread
from gradwire._processes import wait_until
from gradwire.elastic.membership import ports_of
from gradwire.elastic.runtime import GenerationGroup, _own_faults, form_gloo, wait_for
from gradwire.errors import PeerLostError
from gradwire.shm import in_time


def test_sockets_that_another_thread_closes_are_passed_over() -> None:
    """Those of a group are found among all of this process's."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as connection:
            fd, own = connection.fileno(), connection.getsockname()[1]
            socket.setdefaulttimeout(5)  # would change the process's sockets
            try:
                assert ports_of(fd) == (own, port)
            finally:
                socket.setdefaulttimeout(None)
            assert os.get_blocking(fd)
        assert ports_of(server.fileno()) == ports_of(fd) == ()
    with open("/proc/self/stat") as file:
        assert ports_of(file.fileno()) == ()


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
    with _own_faults():
        in_time(lambda: fail(held), 60.0)


def collective(found: list[weakref.ref[Held]]) -> None:
    held = Held()
    found.append(weakref.ref(held))
    wait_for(FailingWork(), lambda: None, 5.0)


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


class Backend:
    """Stands for Gloo's backend, whose destructor joins threads that are stuck."""

    def __init__(self, destroyed_in: list[int], stuck: threading.Event) -> None:
        self._destroyed_in, self._stuck = destroyed_in, stuck

    def __del__(self) -> None:
        self._stuck.wait(60)
        self._destroyed_in.append(threading.get_ident())


@pytest.mark.parametrize("early", [False, True])
def test_a_backend_is_destroyed_in_a_thread_of_its_own(early: bool) -> None:
    destroyed_in: list[int] = []
    stuck = threading.Event()
    owner = Held()
    destroy = destroy_in_thread(owner, Backend(destroyed_in, stuck))
    if early:
        destroy()
    destroy()
    del owner
    assert not destroyed_in  # it is stuck
    stuck.set()
    assert wait_until(lambda: bool(destroyed_in), 60)
    assert destroyed_in != [threading.get_ident()]
    assert wait_until(lambda: destroy not in _groups._BACKENDS, 60)


def form_pair(timeout: timedelta) -> list[GenerationGroup]:
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as pool:
        forming = [
            pool.submit(form_gloo, rank, 2, 1, store, timeout, lambda: None) for rank in range(2)
        ]
        return [future.result() for future in forming]


def test_the_last_reference_to_a_group_in_a_collective_does_not_block() -> None:
    """The sum of gradients, a model and a traceback may hold it longer than the generation does."""
    first, second = form_pair(timedelta(seconds=120))
    assert first.group is not None
    model = nn.Module()
    model.process_group = first.group
    work = first.group.allreduce([torch.ones(1)])  # the other does not take part
    first.leave(failed=False)
    began = time.monotonic()
    del model
    assert time.monotonic() - began < 60
    second.leave(failed=True)  # ends the collective
    with pytest.raises(RuntimeError):
        work.wait()


EXITS = """
import os, time
from gradwire._groups import destroy_in_thread

class Owner: pass

class Backend:
    def __del__(self):
        time.sleep(0.5)
        os.write(1, b"destroyed")

owner = Owner()
destroy_in_thread(owner, Backend())
del owner
"""


def test_a_process_exits_after_its_backends_are_destroyed() -> None:
    """Gloo's destructor takes the GIL: the process was aborted, after a run that was done."""
    ended = subprocess.run([sys.executable, "-c", EXITS], capture_output=True, check=True)
    assert ended.stdout == b"destroyed"
