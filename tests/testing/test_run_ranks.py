"""What `run_ranks` gives to the function and brings back from it."""

from __future__ import annotations

import os
import random
import sys
import threading
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gradwire.testing import run_ranks

pytestmark = pytest.mark.timeout(60)


@dataclass
class Point:
    x: int


def rank_and_pid() -> tuple[int, int]:
    return dist.get_rank(), os.getpid()


def moved(point: Point) -> Point:
    return Point(point.x + dist.get_rank())


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_rank_is_in_one_group_and_results_come_by_rank(world_size: int) -> None:
    def member() -> tuple[int, int, str, torch.Tensor]:
        total = torch.tensor([dist.get_rank() + 1.0])
        dist.all_reduce(total)
        return dist.get_rank(), dist.get_world_size(), dist.get_backend(), total

    results = run_ranks(member, world_size)
    expected = torch.tensor([world_size * (world_size + 1) / 2])
    assert [r[:3] for r in results] == [(r, world_size, "shm") for r in range(world_size)]
    assert all(torch.equal(r[3], expected) for r in results)


def test_local_state_functions_and_classes_of_a_test_module_travel() -> None:
    offset = 5
    assert run_ranks(lambda: moved(Point(offset))) == [Point(5), Point(6)]
    assert run_ranks(moved, args=(Point(1),)) == [Point(1), Point(2)]
    assert run_ranks(partial(moved, Point(2))) == [Point(2), Point(3)]
    assert run_ranks(lambda a, b: a * 10 + b + dist.get_rank(), args=(4, 2)) == [42, 43]
    assert run_ranks(dist.get_world_size, 3, may_die={0}, backend="cpu:gloo") == [3, 3, 3]
    view = torch.nn.Parameter(torch.arange(6.0).view(2, 3).t())
    for result in run_ranks(lambda: view):
        assert isinstance(result, torch.nn.Parameter)
        assert torch.equal(result, view)


def test_processes_are_reused() -> None:
    first = run_ranks(rank_and_pid, 2)
    assert os.getpid() not in dict(first).values()
    assert run_ranks(rank_and_pid, 3)[:2] == first
    assert run_ranks(rank_and_pid, 2) == first


def test_calls_from_several_threads_take_turns() -> None:
    results: dict[int, list[int]] = {}

    def call(number: int) -> None:
        results[number] = run_ranks(lambda: number)

    threads = [threading.Thread(target=call, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {n: [n, n] for n in range(3)}


def test_a_rank_that_returns_early_stays_until_the_others_have_returned() -> None:
    def chain() -> int:
        # Rank 0 is done first, while ranks 1 and 2 still talk to each other and find its store.
        if dist.get_rank() == 0:
            return 0
        total = 0
        for number in range(50):
            value = torch.tensor([number])
            if dist.get_rank() == 1:
                dist.send(value, 2)
            else:
                dist.recv(value, 1)
            total += int(value)
        return total

    assert run_ranks(chain, 3) == [0, 1225, 1225]


def test_subgroups_and_a_group_destroyed_by_the_function() -> None:
    def subgroup() -> int:
        group = dist.new_group([1, 2])
        value = torch.tensor([dist.get_rank()])
        if dist.get_rank() > 0:
            dist.all_reduce(value, group=group)
        dist.barrier()
        dist.destroy_process_group()
        return int(value)

    for _ in range(2):
        assert run_ranks(subgroup, 3) == [0, 3, 3]


def test_a_call_sees_the_caller_s_environment_directory_and_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_ranks(lambda: None)  # the processes exist before anything changes
    (tmp_path / "only_here.py").write_text("ANSWER = 42")
    monkeypatch.setenv("GRADWIRE_TEST", "set")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    def look() -> tuple[str | None, str, int]:
        import only_here  # type: ignore[import-not-found]

        return os.environ.get("GRADWIRE_TEST"), os.getcwd(), only_here.ANSWER

    assert run_ranks(look) == [("set", str(tmp_path), 42)] * 2
    monkeypatch.undo()
    assert run_ranks(lambda: os.environ.get("GRADWIRE_TEST")) == [None, None]
    assert run_ranks(os.getcwd) == [os.getcwd()] * 2


def test_what_a_call_changes_in_its_process_is_put_back() -> None:
    def change() -> None:
        os.environ["GRADWIRE_TEST"] = "left over"
        os.chdir("/")
        sys.path.insert(0, "/left/over")
        torch.set_num_threads(2)
        torch.rand(3)
        random.random()

    def state() -> tuple[Any, ...]:
        return (
            os.environ.get("GRADWIRE_TEST"),
            os.getcwd(),
            sys.path[0],
            torch.get_num_threads(),
            torch.rand(3).tolist(),
            random.random(),
        )

    before = run_ranks(state)
    run_ranks(change)
    assert run_ranks(state) == before
    assert before[0][:4] == (None, os.getcwd(), sys.path[0], 1)
    assert before[0][4:] != before[1][4:]  # ranks do not draw the same numbers


def test_warning_filters_end_with_the_call() -> None:
    def strict() -> str:
        import warnings

        warnings.simplefilter("error")
        try:
            warnings.warn("careful", stacklevel=1)
        except UserWarning as warning:
            return str(warning)
        return "nothing"

    def lenient() -> str:
        import warnings

        warnings.warn("careful", stacklevel=1)
        return "returned"

    assert run_ranks(strict) == ["careful"] * 2
    assert run_ranks(lenient) == ["returned"] * 2


def test_stderr_is_shown_by_rank(capsys: pytest.CaptureFixture[str]) -> None:
    run_ranks(lambda: print(f"hello from {dist.get_rank()}", file=sys.stderr))
    run_ranks(lambda: None)
    shown = capsys.readouterr().err.splitlines()
    assert sorted(shown) == ["[rank 0] hello from 0", "[rank 1] hello from 1"]


def test_a_group_that_outlives_its_call_does_no_harm_to_later_ones() -> None:
    def keep() -> int:
        dist.distributed_c10d._get_default_store().set("a", "little")
        sys.kept = dist.group.WORLD  # type: ignore[attr-defined]
        return os.getpid()

    def let_go() -> int:
        # At its end a store reads on where it stopped, here in the middle of something.
        store = dist.distributed_c10d._get_default_store()
        store.set("much", "x" * 100_000)
        del sys.kept  # type: ignore[attr-defined]
        return os.getpid()

    kept = run_ranks(keep, 2, backend="gloo", timeout=30)
    assert run_ranks(let_go, 2, backend="gloo", timeout=30) == kept
