"""A prepared all_reduce that a signal's handler interrupts: right sums, or an error."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import gradwire.shm
from gradwire.errors import (
    BrokenGroupError,
    DistributedError,
    MismatchError,
    NotSupportedError,
    PeerFailedError,
    PeerLostError,
)
from gradwire.shm.operation_queue import Queue
from gradwire.shm.register import member_of
from gradwire.shm.submission import Submission
from gradwire.testing import run_ranks

SHORT, LONG, LONGER = 7, 100_000, 500_000  # as in test_persistent
SEEDS = 1000 if os.environ.get("GRADWIRE_LONG") == "1" else 60


class Interruption(Exception):
    pass


def at_the_next_call(owner, name, handler):
    """Have a signal handler run as a function is entered, where Python runs handlers anyway."""
    function = getattr(owner, name)

    def interrupted(*args, **keywords):
        setattr(owner, name, function)
        signal.raise_signal(signal.SIGUSR2)
        return function(*args, **keywords)

    signal.signal(signal.SIGUSR2, handler)
    setattr(owner, name, interrupted)


def raises(*_):
    raise Interruption


def interrupted(owner, name, count):
    x, y = torch.full((count,), dist.get_rank() + 1.0), torch.ones(3)
    prepared = gradwire.shm.all_reduce_init(x)
    prepared.start()
    try:
        if dist.get_rank() == 0:
            at_the_next_call(owner, name, raises)
            with pytest.raises(Interruption):
                prepared.wait()
            if member_of(dist.group.WORLD).failure is None:
                prepared.wait()
        else:
            prepared.wait()
        dist.all_reduce(y)
    except (BrokenGroupError, PeerFailedError) as error:
        return type(error).__name__
    return x[0].item(), y[0].item()


BROKEN = ["BrokenGroupError", "PeerFailedError"]


@pytest.mark.parametrize("count", [SHORT, LONG])
@pytest.mark.parametrize(
    ("owner", "name", "expected"),
    [
        (Queue, "take", [(3.0, 2.0)] * 2),
        (Queue, "_enter", [(3.0, 2.0)] * 2),
        (Queue, "leave", [(3.0, 2.0)] * 2),  # it has ended
        (Submission, "_run", BROKEN),  # it is not known how far it has come
    ],
)
def test_an_interrupted_wait_can_be_repeated_or_ends_the_group(owner, name, expected, count):
    """Its own posts and those of the others never count for the next operation."""
    args = (owner, name, count)
    assert run_ranks(interrupted, 2, backend="shm", args=args, timeout=30) == expected


def interrupted_by_the_next(count):
    x, y = torch.full((count,), dist.get_rank() + 1.0), torch.ones(3)
    prepared = gradwire.shm.all_reduce_init(x)
    prepared.start()
    try:
        if dist.get_rank() == 0:
            at_the_next_call(Queue, "_enqueue", raises)
            with pytest.raises(Interruption):
                dist.all_reduce(y)
        else:
            dist.all_reduce(y)
        prepared.wait()
        dist.all_reduce(y)
    except (BrokenGroupError, PeerFailedError, Interruption) as error:
        return type(error).__name__
    return x[0].item(), y[0].item()


@pytest.mark.parametrize("count", [SHORT, LONG])
def test_an_interrupted_operation_in_between_ends_the_group(count):
    """What was held for `wait` was on its way to the thread."""
    results = run_ranks(interrupted_by_the_next, 2, backend="shm", args=(count,), timeout=30)
    assert results[0] == "Interruption"
    assert results[1] in BROKEN


def unless_done(function):
    """Call it again after an interruption, unless it had done what it does: by then, it may have.

    Where a handler raises late in `start`, the group's thread may have ended the operation.
    """
    try:
        function()
    except DistributedError as error:
        if type(error) is not DistributedError:
            raise


def sums_or_error(x, prepared, rounds):
    """What the rounds give, which other ranks take part in, up to the first error's type."""
    results = []
    for _ in range(rounds):
        try:
            unless_done(prepared.start)
            prepared.wait()
        except (BrokenGroupError, PeerFailedError) as error:
            return [*results, type(error).__name__]
        results.append(x.unique().tolist())
        x.fill_(10.0 * (dist.get_rank() + 1))
    return results


RIGHT = [[3.0], [30.0]]


def interrupted_start(count, name, before):
    """Interrupted as a function is entered; the program does not know, and starts it again."""
    x, other = torch.full((count,), dist.get_rank() + 1.0), torch.ones(5)
    prepared, first = (gradwire.shm.all_reduce_init(t) for t in (x, other))
    if before:
        first.start()
    if dist.get_rank() == 0:
        at_the_next_call(Queue, name, raises)
        with pytest.raises(Interruption):
            prepared.start()
    return sums_or_error(x, prepared, 2)


@pytest.mark.narrow({"count": LONG, "before": True}, {"count": LONGER, "name": "run_in_thread"})
@pytest.mark.parametrize("name", ["_enqueue", "run_in_thread"])
@pytest.mark.parametrize(
    ("count", "before"), [(SHORT, True), (LONG, True), (LONGER, False), (LONGER, True)]
)
def test_an_interrupted_start_is_not_run_twice(count, before, name):
    results = run_ranks(interrupted_start, 2, backend="shm", args=(count, name, before), timeout=30)
    for result in results:
        assert result[-1] in ([30.0], *BROKEN)
        assert result[:-1] == RIGHT[: len(result) - 1]


def handler_s_error(count, error):
    """A handler's operation raises through `wait`, of a type that operations of this one raise."""
    x, y = torch.full((count,), dist.get_rank() + 1.0), torch.ones(3 + dist.get_rank())
    group = dist.new_group()
    prepared = gradwire.shm.all_reduce_init(x)

    def handler(*_):
        dist.all_reduce(y, group=group if error is MismatchError else None)

    prepared.start()
    if dist.get_rank() == 0:
        at_the_next_call(Submission, "_run", handler)
        with pytest.raises(error):
            prepared.wait()
    elif error is MismatchError:
        with pytest.raises(error):
            dist.all_reduce(y, group=group)
    results = []
    try:
        if dist.get_rank():
            prepared.wait()
            results.append(x.unique().tolist())
        x.fill_(10.0 * (dist.get_rank() + 1))
        dist.all_reduce(x)
    except (BrokenGroupError, PeerFailedError) as failure:
        return [*results, type(failure).__name__]
    return [*results, x.unique().tolist()]


@pytest.mark.parametrize("count", [SHORT, LONG])
@pytest.mark.parametrize("error", [NotSupportedError, MismatchError])
def test_a_handler_s_error_is_not_taken_for_one_of_the_operation(count, error):
    results = run_ranks(handler_s_error, 2, backend="shm", args=(count, error), timeout=30)
    assert results[0] == ["BrokenGroupError"]
    assert results[1][-1] in BROKEN
    assert results[1][:-1] in ([], [[3.0]])


def handled(owner, name, operation):
    x, y = torch.full((SHORT,), dist.get_rank() + 1.0), torch.ones(SHORT)
    prepared, refused = gradwire.shm.all_reduce_init(x), []

    def handler(*_):
        try:
            prepared.wait() if operation == "wait" else dist.all_reduce(y)
        except NotSupportedError:
            refused.append(True)

    at_the_next_call(owner, name, handler)
    prepared.start()
    prepared.wait()
    dist.all_reduce(y)
    return x[0].item(), y[0].item(), bool(refused)


@pytest.mark.parametrize(
    ("owner", "name", "operation", "y"),
    [
        (Queue, "_run_first", "wait", 2.0),
        (Queue, "_run_first", "all_reduce", 2.0),
        (Queue, "take", "all_reduce", 4.0),
        (Queue, "_enter", "all_reduce", 4.0),
    ],
)
def test_a_handler_s_operation_is_refused_or_runs_in_its_turn(owner, name, operation, y):
    args = (owner, name, operation)
    expected = (3.0, y, y == 2.0)
    assert run_ranks(handled, 2, backend="shm", args=args, timeout=30) == [expected] * 2


class Timed:
    """Calls, some of which a timer interrupts at a random moment, and what is right after them."""

    def __init__(self, seed: int) -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.shared, self.own = random.Random(seed), random.Random(seed * 77 + self.rank)
        self.interrupts = self.rank in self.shared.choice([[0], [self.world - 1], [0, 1, 2]])
        self.value = 0

    def call(self, function: Callable[[], object]) -> None:
        """Call it; again, where it was interrupted."""
        try:
            if self.interrupts and self.own.random() < 0.5:
                signal.setitimer(signal.ITIMER_REAL, self.own.random() ** 3 * 0.0015 + 1e-6)
            try:
                function()
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        except Interruption:
            unless_done(function)  # started, or waited for

    def fill(self, x: torch.Tensor) -> float:
        """Fill a tensor; its sum over the ranks."""
        self.value += 1
        x.fill_(self.value * (self.rank + 1))
        return self.value * self.world * (self.world + 1) / 2


def timed(seed: int, group: dist.ProcessGroup) -> None:
    program = Timed(seed)
    lengths = [program.shared.choice([SHORT, LONG, LONG, LONGER]) for _ in range(2)]
    tensors = [torch.empty(length) for length in lengths]
    prepared = [gradwire.shm.all_reduce_init(x, group=group) for x in tensors]
    for _ in range(program.shared.randint(3, 12)):
        sums = [program.fill(x) for x in tensors]
        for each in prepared:
            program.call(each.start)
        for i in program.own.sample(range(2), 2):
            program.call(prepared[i].wait)
            assert tensors[i].eq(sums[i]).all(), (seed, lengths[i])


def with_random_timers(seeds: range) -> bool:
    ended = []
    for seed in seeds:
        group = dist.new_group(timeout=timedelta(seconds=20))
        signal.signal(signal.SIGALRM, raises)
        try:
            timed(seed, group)
            ended.append(seed)
        except (BrokenGroupError, PeerFailedError, PeerLostError, Interruption):
            pass  # on this rank; others raise, too, or have ended
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        member_of(group).shutdown()
        dist.barrier()
    return bool(ended)


@pytest.mark.wide
@pytest.mark.parametrize("world_size", [2, 3])
def test_random_interruptions_never_give_other_sums(world_size: int) -> None:
    args = (range(SEEDS),)
    assert all(run_ranks(with_random_timers, world_size, backend="shm", args=args, timeout=300))
