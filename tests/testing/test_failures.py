"""What `run_ranks` says when ranks fail, and that the next call works."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gradwire.errors import (
    ArgumentError,
    ArgumentTypeError,
    CollectiveTimeoutError,
    DistributedError,
    NotSupportedError,
)
from gradwire.testing import RankError, run_ranks
from gradwire.testing.ranks import POOL

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def _next_call_works() -> Iterator[None]:
    yield
    assert run_ranks(dist.get_rank) == [0, 1]


class Custom(Exception):
    """Known to this module only."""


class NeedsTwo(Exception):
    """Pickles, but cannot be rebuilt."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(first + second)


class Stubborn:
    def __reduce__(self) -> Any:
        raise RuntimeError("will not be pickled")


class BreaksAtHome:
    def __reduce__(self) -> Any:
        return int, ("not a number",)


def on_rank(rank: int, action: Callable[[], object]) -> Callable[[], int]:
    def fn() -> int:
        if dist.get_rank() == rank:
            action()
        return dist.get_rank()

    return fn


def fail(error: BaseException) -> None:
    raise error


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def differing_sizes() -> None:
    dist.all_reduce(torch.zeros(2 + 100 * dist.get_rank()))


def spoiled_end() -> None:
    dist.destroy_process_group = lambda: fail(Custom("at the end"))  # type: ignore[assignment]


LOCKS = [threading.Lock()]
FAILURES: dict[str, tuple[Callable[[], object], dict[str, Any], type[Exception], str]] = {
    "exit of Python": (on_rank(1, lambda: sys.exit(3)), {}, RankError, "rank 1 of 2: SystemExit"),
    "exit": (on_rank(1, lambda: os._exit(7)), {}, RankError, "^fn failed on rank 1 .* code 7"),
    "kill": (on_rank(1, killed), {}, RankError, "^fn failed on rank 1 of 2: was .* by SIGKILL"),
    "crash": (on_rank(1, lambda: ctypes.string_at(0)), {}, RankError, "killed by SIGSEGV"),
    "abort of Gloo": (
        differing_sizes,
        {"backend": "gloo"},
        RankError,
        r"SIGABRT[\s\S]*Received data size doesn't match",
    ),
    "function": (lambda: LOCKS, {}, ArgumentTypeError, "fn and args must be picklable.*lock"),
    "argument": (lambda _: None, {"args": (Stubborn(),)}, ArgumentTypeError, "not be pickled"),
    "argument there": (
        lambda _: None,
        {"args": (BreaksAtHome(),)},
        RankError,
        "ValueError: invalid literal",
    ),
    "result": (Stubborn, {}, RankError, "fn returned a Stubborn, which cannot be pickled"),
    "result here": (BreaksAtHome, {}, DistributedError, "result of rank 0 cannot be unpickled"),
    "hang": (on_rank(1, dist.barrier), {"timeout": 1}, CollectiveTimeoutError, "on rank 1 of 2"),
    "stop": (
        on_rank(1, lambda: os.kill(os.getpid(), signal.SIGSTOP)),
        {"timeout": 0.5},
        CollectiveTimeoutError,
        "did not show its stack",
    ),
    "error at the end": (on_rank(1, spoiled_end), {}, RankError, "of 2: Custom: at the end"),
}


@pytest.mark.parametrize("how", FAILURES)
@pytest.mark.narrow({"how": ["exit of Python", "kill", "function", "argument", "result", "hang"]})
def test_failures(how: str) -> None:
    fn, options, error, text = FAILURES[how]
    with pytest.raises(error, match=text) as caught:
        run_ranks(fn, **options)
    assert how != "hang" or "--- rank 0" not in str(caught.value)


def test_an_exception_comes_home_with_its_traceback() -> None:
    def divides() -> float:
        return 1 / (1 - dist.get_rank())

    with pytest.raises(RankError, match=r"^fn failed on rank 1 of 2: ZeroDivisionError") as caught:
        run_ranks(divides)
    error = caught.value
    assert isinstance(error, DistributedError)
    assert isinstance(error.__cause__, ZeroDivisionError)
    assert error.failures == {1: error.__cause__}
    assert "in divides" in str(error)
    assert "worker.py" not in str(error)


def test_all_failed_ranks_are_named() -> None:
    with pytest.raises(RankError, match=r"of 3 \(rank \d first\): ValueError: number") as caught:
        run_ranks(lambda: fail(ValueError(f"number {dist.get_rank()}")), 3)
    texts = {rank: str(error) for rank, error in caught.value.failures.items()}
    assert texts == {rank: f"number {rank}" for rank in range(3)}
    assert all(f"--- rank {rank} ---" in str(caught.value) for rank in range(3))


@pytest.mark.parametrize("make", [lambda: NeedsTwo("a", "b"), lambda: ValueError("ab", Stubborn())])
def test_an_exception_that_cannot_travel_is_described(make: Callable[[], Exception]) -> None:
    with pytest.raises(RankError, match="ab") as caught:
        run_ranks(on_rank(1, lambda: fail(make())))
    failure = caught.value.failures[1]
    assert type(failure) is DistributedError
    assert type(make()).__name__ in str(failure)


def test_ranks_that_wait_for_a_failed_one_end_soon() -> None:
    def fails_before_the_collective() -> None:
        if dist.get_rank() == 1:
            raise Custom("no collective for me")
        dist.barrier()

    with pytest.raises(RankError) as caught:
        run_ranks(fails_before_the_collective, timeout=50)
    assert list(caught.value.failures) == [1, 0]  # in the order in which it happened


@pytest.mark.wide
def test_ranks_that_do_not_end_after_a_failure_are_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gradwire.testing.ranks.FAILURE_SECONDS", 0.3)

    def sleeps_for_ever() -> None:
        if dist.get_rank() == 1:
            raise Custom("gone")
        while True:
            time.sleep(1)

    with pytest.raises(RankError, match=r"rank 0 was killed 0\.3 s after") as caught:
        run_ranks(sleeps_for_ever, timeout=50)
    assert list(caught.value.failures) == [1]
    assert "in sleeps_for_ever" in str(caught.value)


@pytest.mark.wide
def test_a_death_is_seen_though_a_child_keeps_the_socket_open(tmp_path: Path) -> None:
    child = tmp_path / "child"

    def leaves_a_child() -> None:
        if pid := os.fork():
            child.write_text(str(pid))
            os._exit(5)
        time.sleep(100)

    with pytest.raises(RankError, match="exited with code 5"):
        run_ranks(on_rank(1, leaves_a_child), timeout=50)
    os.kill(int(child.read_text()), signal.SIGKILL)  # it was still there


@pytest.mark.wide
def test_a_rank_may_die_and_the_others_results_come_back() -> None:
    def survive() -> str:
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            dist.barrier()
        except RuntimeError:
            return "peer lost"
        return "nothing noticed"

    assert run_ranks(survive, 3, may_die=[1]) == ["peer lost", None, "peer lost"]
    with pytest.raises(RankError, match="rank 0 of 2: exited with code 1"):
        run_ranks(on_rank(0, lambda: os._exit(1)), may_die=[1])
    with pytest.raises(RankError, match="Custom"):
        run_ranks(on_rank(1, lambda: fail(Custom())), may_die=[1])


def test_a_hang_shows_the_stack_of_every_thread_of_every_rank() -> None:
    def waits_in_python() -> None:
        threading.Thread(target=waits_in_a_thread, daemon=True).start()
        threading.Event().wait()

    def waits_in_a_thread() -> None:
        threading.Event().wait()

    def waits_with_the_gil() -> None:
        ctypes.PyDLL(None).sleep(100)

    def hangs() -> None:
        waits_in_python() if dist.get_rank() == 0 else waits_with_the_gil()

    with pytest.raises(CollectiveTimeoutError, match=r"within timeout=1 s on ranks 0, 1 of 2") as e:
        run_ranks(hangs, timeout=1)
    rank_0, rank_1 = str(e.value).split("--- rank 1")
    assert "in waits_in_python" in rank_0
    assert "in waits_in_a_thread" in rank_0
    assert "in waits_with_the_gil" in rank_1


def test_signal_handlers_end_with_their_call() -> None:
    def installs() -> None:
        for number in (signal.SIGUSR1, signal.SIGALRM):
            signal.signal(number, lambda *_: None)

    def hangs() -> None:
        assert signal.getsignal(signal.SIGALRM) == signal.SIG_DFL
        threading.Event().wait()

    run_ranks(installs)
    with pytest.raises(CollectiveTimeoutError, match="in hangs"):
        run_ranks(hangs, timeout=1)


@pytest.mark.wide
def test_a_group_that_cannot_be_left_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradwire.testing.ranks.LEAVE_SECONDS", 0.3)

    def spoils_the_end() -> None:
        dist.destroy_process_group = lambda: time.sleep(100)  # type: ignore[assignment]

    with pytest.raises(CollectiveTimeoutError, match="fn returned, but rank 1 of 2 did not leave"):
        run_ranks(on_rank(1, spoils_the_end))


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"fn": 3}, ArgumentTypeError, "fn must be callable, but is a int"),
        ({"world_size": 0}, ArgumentError, "world_size must be an int of at least 1, but is 0"),
        ({"world_size": 2.0}, ArgumentTypeError, "world_size must be an int"),
        ({"timeout": 0}, ArgumentError, "timeout must be a number of seconds > 0, but is 0"),
        ({"timeout": float("nan")}, ArgumentError, "timeout must be a number of seconds > 0"),
        ({"timeout": float("inf")}, ArgumentError, "timeout must be a number of seconds > 0"),
        ({"timeout": "1"}, ArgumentTypeError, "timeout must be a number"),
        (
            {"backend": "carrier-pigeon"},
            ArgumentError,
            "backend .*gloo.*, but is 'carrier-pigeon'",
        ),
        ({"backend": "cpu:gloo,cuda:pigeon"}, ArgumentError, "but is 'cpu:gloo,cuda:pigeon'"),
        ({"backend": None}, ArgumentTypeError, "backend must be a str"),
        ({"may_die": [2]}, ArgumentError, r"may_die names ranks \[2\], but world_size=2"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        run_ranks(**{"fn": dist.get_rank, **arguments})


def test_without_cloudpickle_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "cloudpickle", None)
        with pytest.raises(NotSupportedError, match=r"pip install 'gradwire\[test\]'"):
            run_ranks(dist.get_rank)


@pytest.mark.wide
def test_a_process_that_cannot_start_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    POOL.close()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", "/bin/false")
        with pytest.raises(
            DistributedError, match="worker process exited with code 1 at its start"
        ):
            run_ranks(dist.get_rank)
