"""Frameworks' programs: unedited, by environment alone, and by each framework's own option."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

PROGRAMS = Path(__file__).parent / "programs"
ON = {"GRADWIRE_COMPAT": "1", "GRADWIRE_BACKEND": "shm"}
OFFLINE = {"HF_HUB_OFFLINE": "1", "DS_ACCELERATOR": "cpu", "RAY_TRAIN_V2_ENABLED": "1"}
OURS = "gradwire.compat.ddp"
THEIRS = "torch.nn.parallel.distributed"

pytestmark = [pytest.mark.timeout(600), pytest.mark.wide]

runs: dict[tuple[Any, ...], list[Any]] = {}
"""What programs said: tests share the stock runs."""


@pytest.fixture
def told(run, tmp_path):
    """What a program says: its model's wrapper, the backend's name, whether it is shm, losses."""

    def told(package: str, program: str, *args: str, ranks: int = 2, **variables: str) -> list[Any]:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
        key = (program, args, ranks, *variables.items())
        if key in runs:
            return runs[key]
        args = tuple(arg.replace("TMP", str(tmp_path)) for arg in args)
        ended = run(PROGRAMS / program, args=args, ranks=ranks, timeout=280, **OFFLINE, **variables)
        lines = [line for line in ended.stdout.splitlines() if line.startswith("RESULT ")]
        assert ended.returncode == 0, ended.stdout + ended.stderr
        assert lines, ended.stdout + ended.stderr
        runs[key] = json.loads(lines[-1].removeprefix("RESULT "))
        return runs[key]

    return told


UNEDITED = {
    "lightning": ("lightning_trainer.py", 0, []),
    "lightning manual": ("lightning_trainer.py", 0, ["manual"]),
    "transformers": ("transformers_trainer.py", 2, []),
    "accelerate": ("accelerate_loop.py", 2, []),
    "ray": ("ray_trainer.py", 0, ["TMP"]),
    "timm": ("timm_model.py", 2, ["gloo"]),
    "torch": ("async_checkpoint.py", 2, ["gloo", "TMP/saved"]),
}


@pytest.mark.parametrize("case", UNEDITED)
def test_unedited_by_environment_alone(told, case):
    program, ranks, args = UNEDITED[case]
    package = case.partition(" ")[0]
    stock = told(package, program, *args, ranks=ranks)
    ours = told(package, program, *args, ranks=ranks, **ON)
    assert stock[:3] == [THEIRS, "gloo", False]
    assert ours[:3] == [OURS, "gloo", True]
    assert ours[3] == pytest.approx(stock[3], rel=1e-4)
    assert len(stock[3]) >= 3


def test_accelerate_s_own_script_of_gradient_synchronisation(told):
    on_cpu = {"ACCELERATE_USE_CPU": "true"}
    stock = told("accelerate", "accelerate_test_sync.py", **on_cpu)
    ours = told("accelerate", "accelerate_test_sync.py", **on_cpu, **ON)
    assert stock == [THEIRS, "gloo", False]
    assert ours == [OURS, "gloo", True]


RECIPES = {
    "lightning": ("lightning_trainer.py", 0, ["shm"], []),
    "ray": ("ray_trainer.py", 0, ["TMP", "shm", "hook"], ["TMP"]),
    "deepspeed": ("deepspeed_engine.py", 2, ["shm", "0"], ["gloo", "0"]),
    "deepspeed ZeRO": ("deepspeed_engine.py", 2, ["shm", "2"], ["gloo", "2"]),
    "timm": ("timm_model.py", 2, ["shm"], ["gloo"]),
    "torch": ("async_checkpoint.py", 2, ["shm", "TMP/saved"], ["gloo", "TMP/saved"]),
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_by_the_framework_s_own_option(told, recipe):
    program, ranks, args, stock_args = RECIPES[recipe]
    package = recipe.partition(" ")[0]
    stock = told(package, program, *stock_args, ranks=ranks)
    ours = told(package, program, *args, ranks=ranks)
    assert stock[1:3] == ["gloo", False]
    assert ours[1:3] == ["shm", True]
    assert ours[3] == pytest.approx(stock[3], rel=1e-4)


@pytest.mark.parametrize("package", ["accelerate", "transformers"])
def test_the_mean_over_tokens(told, package):
    """As docs/recipes/tokens.md has it, and wrong without its line."""
    program = f"{package}_tokens.py"
    assert told(package, program, "plain", **ON) > 0.1
    assert told(package, program, "weighted", **ON) < 1e-5
