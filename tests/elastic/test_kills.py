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


TIMES = dict.fromkeys(("rendezvous", "form", "transfer", "sent", "save"), 1) | {"validate": 3}
CUTS = [("RESET", 0.2), ("JOIN", 0.25), ("RESET", 0.4), ("STORE", 0.5)]
LOST = {0: ("commit", 3), 2: ("backward", 2)}
PLANS: dict[str, tuple[Plan, int]] = {  # and how many members come to the end
    "the first in a commit": (Plan(1, 2, "shm", self_kills={0: ("commit", 3)}), 1)
}
for backend in ("shm", "gloo"):
    for point in POINTS:
        plan = Plan(2, 3, backend, self_kills={1: (point, TIMES.get(point, 5))})
        PLANS[f"{point}, {backend}"] = plan, 2
    # one joins again, and is sent the state; of that loss, the receiver is told
    kills = {1: ("commit", 5), 0: ("sent", 2)}
    plan = Plan(8, 2, backend, self_kills=kills, restart=True, pause=0.02)
    PLANS[f"after its state was sent, {backend}"] = plan, 0
    plan = Plan(4, 3, backend, from_outside=[("STOP", 0.1)], pause=0.01)
    PLANS[f"stopped and taken for lost, {backend}"] = plan, 2
    kills_by = {"self_kills": LOST, "from_outside": [("KILL", 0.2)]}
    PLANS[f"without the tree, {backend}"] = Plan(5, 3, backend, reproducible=False, **kills_by), 1
    plan = Plan(7, 3, backend, kind="local", pause=0.02, from_outside=CUTS)
    PLANS[f"connections are reset in local steps, {backend}"] = plan, 2
for kind in ("fused", "bfloat16"):
    for backend, point in (("shm", "reduce"), ("gloo", "validate")):
        plan = Plan(3, 2, backend, kind=kind, self_kills={0: (point, 3)})
        PLANS[f"{kind}, {point}"] = plan, 1
for at in (("forward", 30), ("reduce", 3), ("settle", 2)):
    PLANS[f"local steps, {at[0]}"] = Plan(6, 3, "shm", kind="local", self_kills={1: at}), 2


@pytest.mark.wide
@pytest.mark.parametrize("name", PLANS)
def test_members_are_lost(name: str) -> None:
    plan, least = PLANS[name]
    if "reset" in name and not links.can_cut():
        pytest.skip("this takes root, ss, ip, nsenter and unshare")
    assert check(plan, *quiet_run(plan.kind))["done"] >= least


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
@pytest.mark.skipif(not LONG, reason="GRADWIRE_LONG=1")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("reproducible", "kind"), [(True, ""), (False, ""), (True, "local")])
def test_200_random_runs(reproducible: bool, kind: str) -> None:
    for seed in range(200):
        cuts = links.can_cut()
        plan = Plan.random(seed, reproducible=reproducible, kind=kind, cuts=cuts)
        check(plan, *quiet_run(plan.kind))
