"""The command: options, exit codes, and programs that hang or fail because of their mistake."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from gradwire.check import CHECKS, choose
from gradwire.cli.app import app

ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

mistakes = sys.argv[1:]
if "nothing" in mistakes:
    sys.exit()
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0 if "seed" in mistakes else rank)
net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
model = DistributedDataParallel(net)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
if "uneven" in mistakes:
    x = torch.randn(40 + 16 * rank, 4)
    loader = DataLoader(TensorDataset(x), 8)  # uneven
    batches = (x for x, in loader)
else:
    batches = (torch.randn(8, 4) for _ in range(6))
for step, x in enumerate(batches):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
if "fail" in mistakes and rank == 1:
    raise KeyError("here")
print(f"printed {len(sys.argv)}\\n", end="", flush=True)
del model, optimizer
dist.destroy_process_group()
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    file = tmp_path / "train.py"
    file.write_text(PROGRAM)
    return file


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gradwire", "check", *arguments],
        env=os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


CHOSEN = choose(CHECKS)


def line(program: Path, mark: str) -> str:
    lines = program.read_text().splitlines()
    return f"{program}:{next(n for n, t in enumerate(lines, 1) if t.endswith('# ' + mark))}"


def test_the_checks_are_listed():
    result = CliRunner().invoke(app, ["check", "--list"])
    assert result.exit_code == 0
    assert all(f"  finds:   {check.finds}" in result.output for check in CHECKS)
    assert "\nrandom-state (with --only)\n" in result.output
    result = CliRunner().invoke(app, ["check", "--list", "--only", "batch-norm"])
    assert result.output.count("finds:") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "PROGRAM is missing"),
        (["nosuch.py"], "PROGRAM is 'nosuch.py', which is not a file"),
        (["--skip", "nosuch", __file__], "'nosuch' is not a check: pass one of same-batches"),
        (["--nproc-per-node", "0", __file__], "0 is not in the range"),
    ],
)
def test_wrong_options_are_rejected(arguments, message):
    result = CliRunner().invoke(app, ["check", *arguments])
    assert result.exit_code == 2
    assert message in result.output
    assert "check [OPTIONS] PROGRAM [ARGUMENTS...]" in result.output


def test_every_check_is_documented():
    page = (ROOT / "docs/howto/check.md").read_text()
    assert [c.name for c in CHECKS if f"**{c.name}**" not in page] == []
    assert len({c.name for c in CHECKS}) == len(CHECKS)
    for check in CHECKS:
        assert check.finds
        assert check.evidence
        assert check.remedy
        assert {*check.explains} <= {c.name for c in CHECKS}


@pytest.mark.wide  # tests/portability has one each time
def test_a_finding_is_reported_as_json(program):
    ended = run("--json", "--steps", "4", str(program), "seed")
    assert ended.returncode == 1, ended.stderr
    told = json.loads(ended.stdout)
    assert [f["check"] for f in told["findings"]] == ["same-batches"]
    assert told["findings"][0]["ranks"] == [0, 1]
    assert told["notes"][0] == f"{len(CHOSEN)} checks of 2 ranks, 4 steps"
    assert [told[k] for k in ("steps", "ranks", "failed", "stalled")] == [4, 2, {}, False]


@pytest.mark.wide
def test_nothing_is_found_in_a_correct_program(program):
    ended = run(str(program))
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == f"nothing found by {len(CHOSEN)} checks of 2 ranks, 6 steps\n"
    assert "Warning" not in ended.stderr
    assert ended.stderr.count("printed 1") == 2


@pytest.mark.wide
@pytest.mark.parametrize(
    ("mistake", "check", "at"),
    [
        ("uneven", "uneven-batches", "uneven"),
    ],
)
def test_a_program_that_ends_because_of_its_mistake(program, mistake, check, at):
    ended = run("--timeout", "15", "--json", str(program), mistake)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    found = json.loads(ended.stdout)["findings"]
    assert [(f["check"], f["line"]) for f in found] == [(check, line(program, at))]


@pytest.mark.wide
def test_a_program_that_fails(program):
    ended = run(str(program), "fail")
    assert ended.returncode == 2, ended.stdout + ended.stderr
    assert "rank 1 failed: KeyError('here')" in ended.stdout


@pytest.mark.wide
def test_a_program_without_steps_was_not_checked(program):
    ended = run(str(program), "nothing")
    assert ended.returncode == 2, ended.stdout + ended.stderr
    assert "nothing was checked: not every rank stepped an optimizer" in ended.stdout


SPAWNED = """
import torch.multiprocessing as mp, torch, torch.distributed as dist, os
def main(rank, scale):
    world = int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", rank=rank, world_size=world)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(torch.randn(8, 4) + rank).square().mean()
        (loss / world if scale else loss).backward()
        optimizer.step()
if __name__ == "__main__":
    mp.spawn(main, (True,), int(os.environ["WORLD_SIZE"]) if NPROCS is None else NPROCS)
"""


@pytest.mark.wide
def test_spawned_processes_are_this_command_s_ranks(tmp_path):
    file = tmp_path / "train.py"
    file.write_text(SPAWNED.replace("NPROCS", "None"))
    ended = run(str(file))
    assert ended.returncode == 1, ended.stdout + ended.stderr
    place = 1 + SPAWNED.splitlines().index("        (loss / world if scale else loss).backward()")
    lines = ended.stdout.splitlines()
    assert lines[0] == "SCALED-BY-WORLD-SIZE"
    assert f"{file}:{place}" in lines
    assert "factor 0.5 with 2 ranks, 0.333 with 3" in " ".join(lines)
    file.write_text(SPAWNED.replace("NPROCS", "3"))
    ended = run(str(file))
    assert ended.returncode == 2, ended.stdout + ended.stderr
    assert "the program spawns 3 processes: pass --nproc-per-node 3" in ended.stdout


@pytest.mark.wide
@pytest.mark.parametrize("name", ["accelerate", "fabric", "torchrun"])
def test_nothing_is_found_in_an_example(name):
    if name != "torchrun":
        pytest.importorskip({"fabric": "lightning_fabric"}.get(name, name))
    ended = run("--steps", "40", str(ROOT / f"examples/train_with_{name}.py"))
    assert ended.returncode == 0, ended.stdout + ended.stderr
