"""The demo, started directly and by torchrun, completed and interrupted."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

FOREVER = ("-m", "gradwire", "demo", "--epochs", "100000")
FIRST_EPOCH = "1/100000 "


def cells(line: str) -> list[str]:
    return re.split(r"\s{2,}", line.strip())


def check_output(out: str) -> None:
    """Check that the output of one epoch is complete and printed once."""
    rows = [cells(line) for line in out.splitlines()]
    (epoch,) = [row for row in rows if row[0] == "1/1"]
    (difference,) = [row for row in rows if row[0] == "largest difference to the twin"]
    assert epoch[3] == difference[1]
    assert difference[2] == "rounding"
    assert 0 < float(difference[1]) < 1e-5  # two ranks and one process round differently
    assert ["parameters in all processes", "equal", "bit for bit"] in rows
    (accuracy,) = [row for row in rows if row[0] == "test accuracy"]
    assert accuracy[1] == epoch[2]
    assert float(accuracy[1].rstrip("%")) > 80
    for name in ("gradwire", "torch's DDP", "torch on Gloo"):
        (times,) = [row for row in rows if row[0] == name]
        step, compute, exposed = (float(cell.removesuffix(" ms")) for cell in times[1:])
        assert compute > 0
        assert abs(step - compute - exposed) < 0.02


def ignores_ctrl_c(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    (blocked,) = re.findall(r"^SigBlk:\s*([0-9a-f]+)$", status, re.MULTILINE)
    return bool(int(blocked, 16) >> (signal.SIGINT - 1) & 1)


@pytest.mark.wide
def test_two_processes_match_one_process(command):
    run = command("-m", "gradwire", "demo", "--epochs", "1")
    code, out, err = run.end()
    assert (code, err) == (0, "")
    assert out.count("  backend  shm\n") == 1
    check_output(out)
    assert not run.survivors()


@pytest.mark.wide
def test_demo_under_torchrun(command):
    run = command(
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *("-m", "gradwire", "demo", "--epochs", "1"),
    )
    code, out, err = run.end()
    assert code == 0, err
    check_output(out)
    assert not run.survivors()


@pytest.mark.wide
def test_difference_by_a_lossy_hook_is_not_a_failure(command):
    code, out, err = command("-m", "gradwire", "demo", "--epochs", "1", "--hook", "bf16").end()
    assert (code, err) == (0, "")
    assert "not rounding: bf16 is lossy" in out
    assert "torch's DDP is omitted" in re.sub(r"\s+", " ", out)


@pytest.mark.wide
def test_ctrl_c_leaves_no_process(command):
    run = command(*FOREVER)
    run.read_until(FIRST_EPOCH)
    assert len(run.ranks()) == 2
    assert all(ignores_ctrl_c(pid) for pid in run.ranks())  # the parent stops them
    os.killpg(run.process.pid, signal.SIGINT)  # like a terminal
    code, _, err = run.end()
    assert code == 130
    assert err == "Interrupted; every process of the demo has been stopped.\n"
    assert not run.survivors()


@pytest.mark.wide
def test_ranks_end_with_a_killed_parent(command):
    run = command(*FOREVER)
    run.read_until(FIRST_EPOCH)
    assert len(run.ranks()) == 2
    run.process.kill()
    assert not run.survivors()


@pytest.mark.wide
def test_death_of_a_rank_ends_the_demo(command):
    run = command(*FOREVER)
    run.read_until(FIRST_EPOCH)
    _, last = run.ranks()
    os.kill(last, signal.SIGKILL)
    code, _, err = run.end()
    assert code == 1
    assert err == "gradwire demo: rank 1 was ended by SIGKILL\n"
    assert not run.survivors()
