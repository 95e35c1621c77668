"""The examples run under torchrun on two ranks, each with the package that it is for."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
NEEDS = {
    "train_with_torchrun": ("torch", "2 ranks, right"),
    "train_with_accelerate": ("accelerate", "2 ranks, gradwire.compat.ddp, right"),
    "train_with_fabric": (
        "lightning_fabric",
        "2 ranks, gradwire.ddp.distributed_data_parallel, right",
    ),
}


def run_example(*command: str, timeout: float) -> str:
    ended = subprocess.run(
        [sys.executable, *command],
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.mark.wide
@pytest.mark.parametrize("name", NEEDS)
def test_an_example_learns(name: str) -> None:
    package, says = NEEDS[name]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    output = run_example(*torchrun, str(EXAMPLES / f"{name}.py"), timeout=100)
    found = re.search(rf"{re.escape(says)}: ([\d.]+)%", output)
    assert found, output
    assert float(found[1]) > 95


@pytest.mark.wide
@pytest.mark.timeout(250)
def test_killed_processes_leave_the_parameters_equal() -> None:
    pytest.importorskip("sklearn")
    output = run_example(str(EXAMPLES / "train_through_kills.py"), "--steps", "100", timeout=200)
    assert "SIGKILL" in output
    assert "equal, bit for bit" in output


@pytest.mark.wide
@pytest.mark.timeout(200)
def test_ray_actors_train_on_when_one_is_killed() -> None:
    if importlib.util.find_spec("ray") is None:
        pytest.skip("ray is not installed")
    output = run_example(str(EXAMPLES / "train_with_ray.py"), timeout=180)
    assert "members: [" in output


def test_every_framework_s_example_is_run() -> None:
    examples = {path.stem for path in EXAMPLES.glob("train_with_*.py")}
    assert examples == {*NEEDS, "train_with_ray"}
