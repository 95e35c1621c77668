"""Members are killed and stopped at all moments: weights and ledger are those of a quiet run."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest

from elastic import links
from elastic.kills import Plan, check, quiet
from elastic.worker import POINTS

LONG = os.environ.get("GRADWIRE_LONG") == "1"


@functools.cache
def quiet_run(kind: str) -> tuple[str, list[float]]:
    return quiet(Plan(0, 1, "shm", kind=kind))


@pytest.fixture
def expected() -> tuple[str, list[float]]:
    return quiet_run("plain")


@pytest.mark.wide
def test_the_first_member_is_killed_in_a_commit_and_another_joins(
    expected: tuple[str, list[float]],
) -> None:
    result = check(Plan(1, 2, "shm", self_kills={0: ("commit", 3)}), *expected)
    assert result["done"] >= 1


@pytest.mark.wide
@pytest.mark.parametrize("backend", ["shm", "gloo"])
@pytest.mark.parametrize("point", POINTS)
def test_killed_at(point: str, backend: str, expected: tuple[str, list[float]]) -> None:
    times = {"rendezvous": 1, "form": 1, "transfer": 1, "sent": 1, "validate": 3, "save": 1}.get(
        point, 5
    )
    assert check(Plan(2, 3, backend, self_kills={1: (point, times)}), *expected)["done"] >= 2


@pytest.mark.wide
@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_killed_after_its_state_was_sent(backend: str, expected: tuple[str, list[float]]) -> None:
    """The receiver is told of the loss, and all begin anew from their own start."""
    kills = {1: ("commit", 5), 0: ("sent", 2)}  # one joins again, and is sent the state
    check(Plan(8, 2, backend, self_kills=kills, restart=True, pause=0.02), *expected)


@pytest.mark.wide
@pytest.mark.parametrize("kind", ["fused", "bfloat16"])
@pytest.mark.parametrize("point", ["reduce", "validate"])
def test_killed_with_other_optimizers_and_dtypes(point: str, kind: str) -> None:
    plan = Plan(
        3, 2, "gloo" if point == "validate" else "shm", kind=kind, self_kills={0: (point, 3)}
    )
    assert check(plan, *quiet_run(kind))["done"] >= 1


@pytest.mark.wide
@pytest.mark.parametrize(("point", "times"), [("forward", 30), ("reduce", 3), ("settle", 2)])
def test_killed_in_local_steps(point: str, times: int) -> None:
    plan = Plan(6, 3, "shm", kind="local", self_kills={1: (point, times)})
    assert check(plan, *quiet_run("local"))["done"] >= 2


@pytest.mark.wide
@pytest.mark.skipif(not links.can_cut(), reason="root, ss, ip, nsenter and unshare")
@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_connections_are_reset_in_local_steps(backend: str) -> None:
    faults = [("RESET", 0.2), ("JOIN", 0.25), ("RESET", 0.4), ("STORE", 0.5)]
    plan = Plan(7, 3, backend, kind="local", pause=0.02, from_outside=faults)
    assert check(plan, *quiet_run("local"))["done"] >= 2


@pytest.mark.wide
@pytest.mark.skipif(not links.can_cut(), reason="root, ss, ip, nsenter and unshare")
@pytest.mark.timeout(300)
def test_networks_go_down_in_local_steps() -> None:
    command = ["unshare", "--net", sys.executable, "-m", "elastic.kills", "--links", "--cuts"]
    options = ["--kind", "local", "--first", "40003", "--runs", "200" if LONG else "3"]
    folder = Path(__file__).parents[1]
    done = subprocess.run([*command, *options], cwd=folder, capture_output=True, check=False)
    assert not done.returncode, done.stdout + done.stderr


@pytest.mark.wide
@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_stopped_and_taken_for_lost(backend: str, expected: tuple[str, list[float]]) -> None:
    plan = Plan(4, 3, backend, from_outside=[("STOP", 0.1)], pause=0.01)
    assert check(plan, *expected)["done"] >= 2


@pytest.mark.wide
@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_without_the_tree(backend: str, expected: tuple[str, list[float]]) -> None:
    kills = {0: ("commit", 3), 2: ("backward", 2)}
    plan = Plan(5, 3, backend, reproducible=False, self_kills=kills, from_outside=[("KILL", 0.2)])
    assert check(plan, *expected)["done"] >= 1


@pytest.mark.wide
@pytest.mark.skipif(not LONG, reason="GRADWIRE_LONG=1")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("reproducible", "kind"), [(True, ""), (False, ""), (True, "local")])
def test_200_random_runs(reproducible: bool, kind: str) -> None:
    for seed in range(200):
        cuts = links.can_cut()
        plan = Plan.random(seed, reproducible=reproducible, kind=kind, cuts=cuts)
        check(plan, *quiet_run(plan.kind))
