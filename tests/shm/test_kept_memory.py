"""Groups and handles release their callers' memory after an operation has ended."""

from __future__ import annotations

import gc
import time
import weakref

import pytest
import torch
import torch.distributed as dist

import gradwire.shm
from gradwire._processes import wait_until
from gradwire.ddp.buckets.ownership import uses
from gradwire.errors import (
    BrokenGroupError,
    CollectiveTimeoutError,
    MismatchError,
    PeerFailedError,
    PeerLostError,
)
from gradwire.shm.register import shm_backend_of
from gradwire.shm.work import ShmWork


class Held:
    """Stands for what a caller has."""


def memory_beside_a_lost_rank(group):
    """A weak reference to what the caller of an allocation had, when a peer was gone."""
    held = Held()
    gradwire.shm.empty(4, group=group)
    return weakref.ref(held)


@pytest.mark.on_ranks(2, backend="gloo")
def test_a_lost_rank_keeps_no_memory_alive():
    """The error that waits for its peers had the frames of whoever met it first."""
    group = dist.new_group(backend="shm")
    if dist.get_rank() == 1:
        dist.destroy_process_group(group)
    dist.barrier()
    if dist.get_rank() == 1:
        return
    links = shm_backend_of(group).state.links
    with links.changed:
        assert links.changed.wait_for(lambda: links.lost, 10.0)
    gc.collect()
    gc.disable()
    try:
        assert memory_beside_a_lost_rank(group)() is None
    finally:
        gc.enable()


CALLS = {
    "all_reduce": lambda x, group: dist.all_reduce(x, group=group),
    "barrier": lambda x, group: dist.barrier(group),
    "recv": lambda x, group: dist.recv(x, group_src=1, group=group),
    "recv from any": lambda x, group: dist.recv(x, group=group),
    "wait": lambda x, group: dist.all_reduce(x, group=group, async_op=True).wait(),
    "future": lambda x, group: dist.all_reduce(x, group=group, async_op=True).get_future().wait(),
    "wait of a receive": lambda x, group: dist.irecv(x, group_src=1, group=group).wait(),
}


def memory_of_a_failed_call(call, x, group):
    """A weak reference to what the caller of a call that fails had, and the error's type."""
    held = Held()
    try:
        call(x, group)
    except RuntimeError as error:  # torch makes one of what a future has
        return weakref.ref(held), type(error)
    raise AssertionError("the call did not fail")


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.on_ranks(2, backend="gloo")
def test_an_error_that_a_group_keeps_keeps_no_memory_alive(call):
    """From PyTorch 2.14 on, that of the callers of an operation that failed was never freed."""
    group = dist.new_group(backend="shm")
    dist.barrier(group)
    if dist.get_rank() == 1:
        dist.destroy_process_group(group)
        return
    # and the caller has the group, which has what it keeps
    held, kind = memory_of_a_failed_call(CALLS[call], torch.ones(3), group)
    with pytest.raises((BrokenGroupError, PeerLostError), match="rank 1 left the group"):
        dist.barrier(group)
    gc.collect()
    assert held() is None
    assert kind is (RuntimeError if call == "future" else PeerLostError)


@pytest.mark.on_ranks(2, backend="gloo")
def test_a_mismatch_keeps_no_memory_alive():
    group = dist.new_group(backend="shm")
    x = torch.ones(3 + dist.get_rank())
    held, kind = memory_of_a_failed_call(CALLS["all_reduce"], x, group)
    gc.collect()
    dist.barrier(group)  # it can be used
    assert held() is None
    assert kind is MismatchError


class Odd(Exception):
    """Cannot be copied by its constructor's arguments."""

    def __init__(self, a, b):
        super().__init__(f"{a} and {b}")


@pytest.mark.parametrize("make", [lambda: CollectiveTimeoutError("too late"), lambda: Odd(1, 2)])
@pytest.mark.on_ranks(2, backend="gloo")
def test_kept_errors_have_the_original_message(make):
    error = make()
    error.__cause__ = OSError("a cable")

    def handler(*_):
        raise error

    group = dist.new_group(backend="shm")
    if dist.get_rank() == 1:
        with pytest.raises(PeerFailedError, match=f"{type(error).__name__}: "):
            dist.all_reduce(torch.ones(3), group=group)
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shm_backend_of(group).state, "announce", handler)
        with pytest.raises(type(error)) as raised:
            dist.all_reduce(torch.ones(3), group=group)
    assert raised.value is error
    with pytest.raises(BrokenGroupError, match=f"{type(error).__name__}: ") as broken:
        dist.barrier(group)
    kept = broken.value.__cause__
    assert kept is not error
    assert str(error) in str(kept)
    assert str(kept.__cause__) == str(error.__cause__)
    assert kept.__traceback__ is None


@pytest.mark.on_ranks(2)
def test_received_tensors_are_freed_with_their_handle():
    """Not by the garbage collector."""
    x = torch.empty(3)
    held = weakref.ref(x)
    work = dist.irecv(x, 1) if dist.get_rank() == 0 else None
    dist.barrier()  # the message comes after the receive was posted
    if work is None:
        dist.send(torch.ones(3), 0)
        return
    gc.collect()
    gc.disable()
    try:
        work.wait()
        del work, x
        # the thread that it came by may still be about to return
        assert wait_until(lambda: held() is None, 10)
    finally:
        gc.enable()


@pytest.mark.on_ranks(2)
def test_memory_is_not_in_use_once_an_operation_has_ended():
    """Else a bucket is taken for one that somebody keeps, and gradients go elsewhere."""
    x = torch.ones(4)
    before = uses(x)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ShmWork, "finish", slow_to_return)
        dist.all_reduce(x, async_op=True).wait()
        assert uses(x) == before


def slow_to_return(work, error=None, source=-1, *, finish=ShmWork.finish):
    finish(work, error, source)
    time.sleep(0.2)
