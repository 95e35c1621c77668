"""The observer in one process: patches, errors and limits; digests; the terms of losses."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from check.common import ROOT
from gradwire.check import Run, training_probes
from gradwire.check.__main__ import observed
from gradwire.check.observer import bit_sum, digest, random_state, sample_digests
from gradwire.check.training_probes import terms_of, uses


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


def test_digests() -> None:
    small, large = torch.randn(8, 4), torch.randn(300, 300)
    for x in (small, large, small.double(), small.bfloat16(), small > 0, small.to(torch.complex64)):
        other = x.clone()
        assert digest(x) == digest(other)
        other.view(-1)[1] = ~other.view(-1)[1] if x.dtype == torch.bool else other.view(-1)[1] + 1
        assert digest(x) != digest(other)
    assert digest(torch.empty(0)) == 0
    assert digest(small.to_sparse()) is None
    assert bit_sum(torch.cat([small, large.T[:4, :4]])) == bit_sum(small) + bit_sum(large[:4, :4])
    assert len(set(sample_digests([small, torch.arange(8)]))) == 8
    assert sample_digests([small, torch.ones(3)]) == []
    before = random_state()
    assert random_state() == before
    torch.randn(1)
    assert random_state() != before


def test_terms_of_losses() -> None:
    net = nn.Linear(4, 3)
    out, y = net(torch.randn(5, 4)), torch.tensor([0, 1, 2, -100, 1])
    mask = torch.tensor([1.0, 1.0, 0.0, 0.0, 1.0])

    def terms(loss: torch.Tensor) -> list[tuple[float, float, bool]]:
        return [(t["count"], round(t["factor"], 6), t["builtin"]) for t in terms_of(loss)]

    assert terms(F.cross_entropy(out, y) * 2 / 4) == [(4, 0.5, True)]
    assert terms(F.cross_entropy(out, y, reduction="sum") / 4) == [(4, 1, False)]
    assert terms(F.cross_entropy(out, y, torch.rand(3))) == []
    assert terms((out.sum(1) * mask).sum() / mask.sum()) == [(3, 1, False)]
    assert terms(out.square().mean() - 0.1 * F.mse_loss(out, torch.ones(5, 3))) == [
        (15, 1, True),
        (15, -0.1, True),
    ]
    assert terms(out.sum()) == terms(out.std()) == []
    assert terms_of(out) == terms_of(None) == []


def test_gathered_tensors_in_a_loss() -> None:
    z = nn.Linear(4, 3)(torch.randn(5, 4))
    others = [z.detach().clone(), torch.randn(5, 3)]
    assert uses((z @ torch.cat(others).T).sum(), others, z)
    assert uses((z * others[1]).sum(), others, z)
    assert not uses((z * others[0]).sum(), others, z)  # only its own
    assert not uses((z @ torch.cat([z, others[1]]).T).sum(), others, z)
    assert not uses(z.sum(), others, z)


@pytest.mark.wide
def test_training_does_not_import_it() -> None:
    imports = "import sys, gradwire, gradwire.ddp, gradwire.compat"
    code = f"{imports}; print('gradwire.check' in sys.modules)"
    command = [sys.executable, "-c", code]
    environment = {"PYTHONPATH": str(ROOT / "src")}
    output = subprocess.check_output(command, env=environment, text=True, timeout=60)
    assert output == "False\n"
