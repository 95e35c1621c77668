"""The demo's mode "devices": replicas in one process, compared with the bare network."""

from __future__ import annotations

import re
import signal
from unittest import mock

import pytest
import torch
from click.testing import CliRunner

from gradwire.cli.app import app
from gradwire.cli.demo import train as demo_train
from gradwire.cli.demo.options import DEVICES, DemoOptions
from gradwire.cli.demo.rank import Result
from gradwire.cli.demo.train import TOLERANCE, Difference, Epoch, load_digits, train
from gradwire.cli.demo.view import failures
from gradwire.cli.launch import RankEnv

OPTIONS = DemoOptions(4, epochs=1, mode=DEVICES)
TIMES = {"compute": 0.1, "gradwire": 0.1}


def refusal(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["demo", "--mode", "devices", *arguments])
    assert result.exit_code == 2
    assert result.stdout == ""
    return result.stderr


@pytest.mark.wide
def test_four_replicas_match_one_model(command):
    run = command("-m", "gradwire", "demo", "--mode", "devices", "--epochs", "1")
    code, out, err = run.end()
    assert (code, err) == (0, "")
    rows = [re.split(r"\s{2,}", line.strip()) for line in out.splitlines()]
    assert rows[0] == ["gradwire demo: one network in 4 replicas on one CPU, by DataParallel"]
    (epoch,) = [row for row in rows if row[0] == "1/1"]
    (difference,) = [row for row in rows if row[0] == "largest difference to the twin"]
    assert epoch[3] == difference[1]
    assert difference[2] == "rounding"
    assert 0 < float(difference[1]) < 1e-5
    (accuracy,) = [row for row in rows if row[0] == "test accuracy"]
    assert accuracy[1] == epoch[2]
    assert float(accuracy[1].rstrip("%")) > 80
    (times,) = [row for row in rows if row[0] == "gradwire"]
    step, compute, replicas = (float(cell.removesuffix(" ms")) for cell in times[1:])
    assert compute > 0
    assert abs(step - compute - replicas) < 0.02
    assert not run.survivors()


@pytest.mark.wide
def test_ctrl_c_ends_the_demo(command):
    run = command("-m", "gradwire", "demo", "--mode", "devices", "--epochs", "100000")
    run.read_until("1/100000 ")
    run.process.send_signal(signal.SIGINT)
    code, _, err = run.end()
    assert (code, err) == (130, "Interrupted.\n")


@pytest.mark.usefixtures("no_launcher")
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--nproc 2", "--nproc is 2, but --mode devices runs in one process"),
        ("--backend gloo", "--backend is gloo, but --mode devices runs in one process"),
        ("--hook none", "--hook is none, but --mode devices runs in one process"),
        ("--batch-size 3", "--batch-size is 3: pass at least the number of replicas (4)"),
        ("--epochs 0", "'--epochs': 0 is not in the range x>=1"),
    ],
)
def test_options_for_processes_are_rejected(arguments, said):
    assert said in refusal(*arguments.split())


def test_torchrun_is_rejected_by_rank_0(monkeypatch):
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT")
    for name, value in zip(names, "00221", strict=True):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert "WORLD_SIZE is 2" in refusal()
    monkeypatch.setenv("RANK", "1")
    assert refusal() == ""


@pytest.mark.wide
def test_lost_replica_in_one_step_exceeds_rounding():
    steps = 0

    class Losing(demo_train.DataParallel):
        """Wrapper that loses the last replica's gradients in the third step."""

        def gather(self, outputs, output_device):
            nonlocal steps
            steps += 1
            if steps == 3:
                outputs = [*outputs[:-1], outputs[-1].detach()]
            return super().gather(outputs, output_device)

    with mock.patch.object(demo_train, "DataParallel", Losing):
        digits = load_digits(0, torch.device("cpu"))
        _, last = train(OPTIONS, RankEnv(0, 1, 0, 1), None, digits, lambda epoch: None)
    assert last.difference.relative > 10 * TOLERANCE
    (said,) = failures(Result(last, True, TIMES), OPTIONS)
    assert "more than rounding" in said


def test_rounding_is_not_a_failure():
    last = Epoch(1, 0.5, 300, Difference(1e-7, TOLERANCE))
    assert failures(Result(last, True, TIMES), OPTIONS) == []
