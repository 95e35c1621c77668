"""An all_reduce that is prepared once: values, order beside other operations, errors."""

from __future__ import annotations

import os
import signal

import pytest
import torch
import torch.distributed as dist

import gradwire.shm
from gradwire.errors import (
    ArgumentError,
    ArgumentTypeError,
    BrokenGroupError,
    DistributedError,
    MismatchError,
    PeerFailedError,
    PeerLostError,
)
from gradwire.shm import meeting
from gradwire.shm.register import member_of
from gradwire.shm.sync import spins_for
from gradwire.testing import run_ranks

SHORT = 7  # travels with the header
LONG = 100_000  # between two ranks: ranks wait for each other's second half
LONGER = 500_000  # run by the group's thread
COUNTS = [SHORT, LONG, LONGER]


def again_and_again(count, op, allocate=torch.empty):
    rank, world = dist.get_rank(), dist.get_world_size()
    x = allocate(count)
    prepared = gradwire.shm.all_reduce_init(x, op)
    for step in range(5):
        values = [torch.arange(count) % 5 + r + step + 1.0 for r in range(world)]
        x.copy_(values[rank])
        version = x._version
        prepared.start()
        prepared.wait()
        expected = values[rank].clone()
        dist.all_reduce(expected, op)
        assert x.equal(expected)
        if gradwire.shm.shares_memory(dist.group.WORLD):  # Gloo's does not count
            assert x._version > version


@pytest.mark.narrow({"backend": "shm"})
@pytest.mark.parametrize("backend", ["shm", "gloo"])
@pytest.mark.parametrize("count", COUNTS)
def test_gives_what_all_reduce_gives_each_time(backend, count):
    run_ranks(again_and_again, 2, backend=backend, args=(count, dist.ReduceOp.SUM), timeout=30)


@pytest.mark.parametrize("count", COUNTS)
def test_takes_tensors_in_the_segment(count):
    args = (count, dist.ReduceOp.SUM, gradwire.shm.empty)
    run_ranks(again_and_again, 2, backend="shm", args=args, timeout=30)


@pytest.mark.narrow({"op": "AVG"})
@pytest.mark.parametrize("op", ["AVG", "MAX", "PRODUCT"])
def test_takes_every_reduce_op_between_three(op):
    op = getattr(dist.ReduceOp, op)
    run_ranks(again_and_again, 3, backend="shm", args=(SHORT, op), timeout=30)


def among_others(count):
    rank = dist.get_rank()
    first, second, other = (torch.full((n,), rank + 1.0) for n in (count, SHORT, 3))
    one, two = (gradwire.shm.all_reduce_init(x) for x in (first, second))
    one.start()
    two.start()
    work = dist.all_reduce(other, async_op=True)
    dist.barrier()
    if rank:  # what is waited for first differs between ranks
        two.wait()
        one.wait()
    else:
        one.wait()
        two.wait()
    work.wait()
    return [x[-1].item() for x in (first, second, other)]


@pytest.mark.parametrize("count", COUNTS)
def test_other_operations_may_come_in_between(count):
    assert run_ranks(among_others, 2, backend="shm", args=(count,), timeout=30) == [[3.0] * 3] * 2


def waits_elsewhere(count, how, spins=None):
    x, y = torch.ones(count), torch.ones(3)
    if spins is not None and dist.get_rank() == 1:
        meeting.spins_for = lambda _: spins
    try:
        prepared = gradwire.shm.all_reduce_init(x, group=dist.new_group(backend="shm"))
    finally:
        meeting.spins_for = spins_for
    group = None if how == "point to point" else dist.new_group(backend=how)
    for _ in range(3):
        prepared.start()
        if dist.get_rank() == 1:
            prepared.wait()
        if how != "point to point":
            dist.all_reduce(y, group=group)
        elif dist.get_rank() == 0:
            dist.recv(y, 1)
        else:
            dist.send(y, 0)
        if dist.get_rank() == 0:
            prepared.wait()
    return x.eq(8).all().item()


@pytest.mark.narrow({"count": [SHORT, LONG]})
@pytest.mark.parametrize("how", ["point to point", "gloo", "shm"])
@pytest.mark.parametrize("count", COUNTS)
def test_others_end_theirs_when_a_rank_has_started(count, how):
    """A rank that waits for something of theirs first would wait for ever."""
    args = (count, how)
    assert run_ranks(waits_elsewhere, 2, backend="shm", args=args, timeout=30) == [True, True]


def test_others_end_theirs_if_they_do_not_spin():
    """As where a container gives one of them fewer cores."""
    args = (LONG, "gloo", 1)
    assert run_ranks(waits_elsewhere, 2, backend="shm", args=args, timeout=30) == [True, True]


def leaves(how):
    group = dist.new_group()
    prepared = gradwire.shm.all_reduce_init(torch.ones(LONG), group=group)
    prepared.start()
    if dist.get_rank() == 0:
        getattr(member_of(group), how)()
        with pytest.raises(BrokenGroupError):
            prepared.wait()
    else:
        with pytest.raises((PeerLostError, PeerFailedError), match=r"rank 0 left|failed on rank 0"):
            prepared.wait()
    dist.barrier()


@pytest.mark.parametrize("how", ["shutdown", "abort"])
def test_others_hear_of_a_rank_that_leaves_between_start_and_wait(how):
    run_ranks(leaves, 2, backend="shm", args=(how,), timeout=30)


def in_a_callback(count, receives):
    """The group's thread calls it, which no other can stand in for."""
    rank, x = dist.get_rank(), torch.full((count,), dist.get_rank() + 1.0)
    prepared = gradwire.shm.all_reduce_init(x)

    def callback(_):
        prepared.start()
        if receives:
            dist.recv(torch.empty(1), 1)
        prepared.wait()

    if rank == 0:
        work = dist.all_reduce(torch.ones(3), async_op=True)
        work.get_future().then(callback).wait()
    else:
        dist.all_reduce(torch.ones(3))
        prepared.start()
        prepared.wait()
        if receives:
            dist.send(torch.ones(1), 0)
    return x[-1].item()


@pytest.mark.parametrize("receives", [False, True])
@pytest.mark.parametrize("count", [SHORT, LONG])
def test_a_future_s_callback_may_start_and_wait(count, receives):
    args = (count, receives)
    assert run_ranks(in_a_callback, 2, backend="shm", args=args, timeout=30) == [3.0, 3.0]


def forked(count):
    x = torch.full((count,), dist.get_rank() + 1.0)
    prepared = gradwire.shm.all_reduce_init(x)
    prepared.start()
    if dist.get_rank() == 0:
        child = os.fork()
        if not child:
            try:
                prepared.wait()
            except BrokenGroupError:
                os._exit(3)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    prepared.wait()
    dist.barrier()
    return x[-1].item()


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
@pytest.mark.parametrize("count", COUNTS)
def test_a_forked_process_cannot_wait(count):
    assert run_ranks(forked, 2, backend="shm", args=(count,), timeout=30) == [3.0, 3.0]


def fits_ordinary(count):
    x = torch.ones(count)
    if dist.get_rank():
        dist.all_reduce(x)
    else:
        prepared = gradwire.shm.all_reduce_init(x)
        prepared.start()
        prepared.wait()
    return x.eq(2).all().item()


@pytest.mark.parametrize("count", COUNTS)
def test_fits_an_ordinary_all_reduce_of_another_rank(count):
    assert run_ranks(fits_ordinary, 2, backend="shm", args=(count,), timeout=30) == [True, True]


@pytest.mark.parametrize("op", [dist.ReduceOp.SUM, dist.ReduceOp.AVG], ids=str)
def test_complex_numbers_fit_an_ordinary_all_reduce(op):
    def main():
        x = torch.tensor([1 + 2j, 3 - 4j]) * (dist.get_rank() + 1)
        if dist.get_rank():
            dist.all_reduce(x, op)
        else:
            prepared = gradwire.shm.all_reduce_init(x, op)
            prepared.start()
            prepared.wait()
        return x.tolist()

    factor = 3 if op == dist.ReduceOp.SUM else 1.5
    expected = [(1 + 2j) * factor, (3 - 4j) * factor]
    assert run_ranks(main, 2, backend="shm", timeout=30) == [expected] * 2


def other_memory(count):
    """The tensor is given other memory, and more of it, as a module's `double` does."""
    x = torch.ones(count)
    prepared = gradwire.shm.all_reduce_init(x)
    for allocate, dtype in ((torch.ones, torch.float32), (gradwire.shm.empty, torch.float64)):
        prepared.start()
        prepared.wait()
        kept, before = x.detach(), x.clone()
        x.data = allocate(2 * count, dtype=dtype).fill_(5.0)
        prepared.start()
        prepared.wait()
        assert x.eq(10).all()
        assert kept.equal(before)
    x.data = torch.ones(3, 2).t()
    with pytest.raises(ArgumentError, match="contiguous"):
        prepared.start()


@pytest.mark.parametrize("count", COUNTS)
def test_a_tensor_may_get_other_memory(count):
    run_ranks(other_memory, 2, backend="shm", args=(count,), timeout=30)


def misused():
    x = torch.ones(3)
    prepared = gradwire.shm.all_reduce_init(x)
    with pytest.raises(DistributedError, match="start"):
        prepared.wait()
    prepared.start()
    with pytest.raises(DistributedError, match="wait"):
        prepared.start()
    prepared.wait()
    wrong = [(torch.ones(4, 4).t(), ArgumentError), ([1.0], ArgumentTypeError)]
    for tensor, error in wrong:
        with pytest.raises(error):
            gradwire.shm.all_reduce_init(tensor)
    for keywords in ({"op": "sum"}, {"group": "all"}):
        with pytest.raises(ArgumentTypeError):
            gradwire.shm.all_reduce_init(x, **keywords)
    uneven = gradwire.shm.all_reduce_init(torch.ones(3 + dist.get_rank()))
    uneven.start()
    with pytest.raises(MismatchError, match="number of elements"):
        uneven.wait()
    prepared.start()
    prepared.wait()
    prepared.start()
    group = dist.new_group()
    late = gradwire.shm.all_reduce_init(x, group=group)
    late.start()
    member_of(group).shutdown()
    with pytest.raises(BrokenGroupError):
        late.wait()
    prepared.wait()
    assert x.eq(2**3).all()


def test_misuse_is_an_error_and_the_group_goes_on():
    run_ranks(misused, 2, backend="shm", timeout=30)


def until_it_fails(prepared):
    while True:
        prepared.wait()
        prepared.start()


def one_dies(count):
    x = torch.ones(count)
    prepared = gradwire.shm.all_reduce_init(x)
    prepared.start()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerLostError, match="rank 1"):
        until_it_fails(prepared)
    with pytest.raises(BrokenGroupError):
        prepared.start()
    return True


@pytest.mark.narrow({"world_size": 3, "count": SHORT}, {"world_size": 2, "count": LONG})
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_death_is_noticed(world_size, count):
    results = run_ranks(one_dies, world_size, backend="shm", args=(count,), timeout=30, may_die=[1])
    assert results == [True, None, True][:world_size]
