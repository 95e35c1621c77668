"""The observer in one process: patches, errors and limits; digests; the terms of losses."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from check.common import ROOT
from gradwire.check import Run, training_probes
from gradwire.check.__main__ import observed


def train(steps: int) -> None:
    net = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for (x,) in DataLoader(TensorDataset(torch.randn(steps, 2)), 1):
        optimizer.zero_grad()
        net(x).sum().backward()
        optimizer.step()


def test_patches_are_removed(tmp_path: Path) -> None:
    patched = [
        (torch.autograd, "backward"),
        (torch.distributed, "all_reduce"),
        (torch.nn.utils, "clip_grad_norm_"),
        (torch.optim.Optimizer, "__init__"),
        (torch.optim.lr_scheduler.LRScheduler, "step"),
        (nn.parallel.DistributedDataParallel, "forward"),
        (DataLoader, "__iter__"),
    ]
    before = [getattr(owner, name) for owner, name in patched]
    hooks = len(nn.modules.module._global_forward_pre_hooks)
    with observed(tmp_path, 0):
        during = [getattr(owner, name) for owner, name in patched]
    assert not any(a is b for a, b in zip(before, during, strict=True))
    assert all(getattr(o, n) is b for (o, n), b in zip(patched, before, strict=True))
    assert len(nn.modules.module._global_forward_pre_hooks) == hooks


def test_a_failed_observation_is_recorded_and_given_up(tmp_path: Path, monkeypatch) -> None:
    def fail(*_: object) -> None:
        raise KeyError("here")

    monkeypatch.setattr(training_probes, "terms_of", fail)
    with observed(tmp_path, 0):
        train(3)
    run = Run.read(tmp_path)
    assert [e["probe"] for e in run.of("blind", 0)] == ["_backward"]
    assert len(run.of("stepped", 0)) == 3


def test_nothing_is_written_after_the_last_step(tmp_path: Path) -> None:
    with observed(tmp_path, 0, steps=2):
        train(4)
    run = Run.read(tmp_path)
    assert run.ended(0) == "limit"
    assert len(run.of("stepped", 0)) == len(run.of("backward", 0)) == 2


def test_an_error_of_the_program_is_recorded_and_raised(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), observed(tmp_path, 0):
        raise ZeroDivisionError
    assert Run.read(tmp_path).ended(0) == "error"


@pytest.mark.wide
def test_training_does_not_import_it() -> None:
    imports = "import sys, gradwire, gradwire.ddp, gradwire.compat"
    code = f"{imports}; print('gradwire.check' in sys.modules)"
    command = [sys.executable, "-c", code]
    environment = {"PYTHONPATH": str(ROOT / "src")}
    output = subprocess.check_output(command, env=environment, text=True, timeout=60)
    assert output == "False\n"
