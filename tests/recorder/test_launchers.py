"""Other launchers and wrappers: recorder and timeline by environment variables, and verdicts."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from gradwire.cli.app import app
from gradwire.recorder.verdict import Kind, explain

PROGRAMS = Path(__file__).parents[1] / "integrations" / "programs"
SLURM = """
import os, sys
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

rank, size = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
dist.init_process_group("gloo", init_method=sys.argv[1], rank=rank, world_size=size)
model = DistributedDataParallel(torch.nn.Linear(4, 4))
for step in range(3):
    model(torch.ones(2, 4)).sum().backward()
if "fail" in sys.argv and rank == 1:
    raise KeyError("here")
dist.barrier()
"""

pytestmark = [pytest.mark.wide, pytest.mark.timeout(400)]


@pytest.fixture
def places(tmp_path):
    """Environment, directory of dumps and file of the timeline."""
    dumps, trace = tmp_path / "dumps", tmp_path / "run.json"
    variables = {"GRADWIRE_RECORDER": str(dumps), "GRADWIRE_TIMELINE": str(trace)}
    return variables | {"GRADWIRE_COMPAT": "1", "GRADWIRE_BACKEND": "shm"}, dumps, trace


def said(*arguments: str):
    result = CliRunner().invoke(app, [*arguments, "--json"])
    return result.exit_code, json.loads(result.stdout)


def check(dumps: Path, trace: Path) -> None:
    code, verdict = said("explain", str(dumps))
    assert (code, verdict["dumps"]) == (0, [0, 1]), verdict
    code, summary = said("timeline", str(trace))
    assert [(rank["rank"], rank["steps"] >= 3) for rank in summary["ranks"]] == [
        (0, True),
        (1, True),
    ]
    assert [path.name for path in trace.parent.glob("run.json*")] == ["run.json"]


@pytest.mark.parametrize(
    ("package", "program", "args"),
    [("lightning", "lightning_trainer.py", []), ("ray", "ray_trainer.py", ["TMP"])],
)
def test_frameworks(run, places, tmp_path, package, program, args):
    """Ray kills its workers, so their records must be written before that."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    variables, dumps, trace = places
    args = [arg.replace("TMP", str(tmp_path)) for arg in args]
    more = {"RAY_TRAIN_V2_ENABLED": "1"}
    ended = run(PROGRAMS / program, args=args, timeout=280, **variables, **more)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    check(dumps, trace)


def start_tasks(site, tmp_path, variables, *arguments):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    program = tmp_path / "train.py"
    program.write_text(SLURM)
    paths = [str(site), str(Path(__file__).parents[2] / "src")]
    environment = os.environ | variables | {"PYTHONPATH": os.pathsep.join(paths)}
    return [
        subprocess.Popen(
            [sys.executable, str(program), address, *arguments],
            env=environment
            | {"SLURM_PROCID": str(rank), "SLURM_NTASKS": "2", "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]


def end(tasks):
    try:
        return [(task.communicate(timeout=100)[1], task.returncode) for task in tasks]
    finally:
        for task in tasks:
            task.kill()


@pytest.mark.parametrize("arguments", [(), ("fail",)])
def test_slurm(site, places, tmp_path, arguments):
    variables, dumps, trace = places
    ended = end(start_tasks(site, tmp_path, variables, *arguments))
    assert [code for _, code in ended] == [len(arguments)] * 2, ended
    if not arguments:
        check(dumps, trace)
        return
    code, verdict = said("explain", str(dumps))
    first = verdict["findings"][0]
    assert (code, first["kind"], first["ranks"]) == (1, "error", [1])
    assert first["places"] == [f"{tmp_path / 'train.py'}:12"]


# -- FSDP or a compiled module calls the collectives -----------------------------------------------

SHARDED = Path(__file__).parent / "programs" / "sharded.py"
EXPECTED = {"skip": Kind.MISMATCH, "raise": Kind.ERROR, "loop": Kind.MISSING}


def line_of(mark: str) -> str:
    lines = SHARDED.read_text().splitlines()
    number = next(n for n, text in enumerate(lines, 1) if text.endswith(f"# here: {mark}"))
    return f"{SHARDED}:{number}"


@pytest.mark.parametrize(
    ("backend", "wrapper", "accident"),
    [("gloo", "fsdp", "loop"), ("shm", "fsdp", "raise"), ("shm", "compiled", "skip")],
)
def test_verdict_names_rank_and_line(tmp_path, backend, wrapper, accident):
    launch = [sys.executable, "-m", "gradwire", "run", "--standalone", "--nproc-per-node", "3"]
    command = [*launch, "--recorder", str(tmp_path), str(SHARDED), backend, wrapper, accident]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert ended.returncode != 0
    finding = explain(tmp_path).findings[0]
    assert (finding.kind, finding.ranks) == (EXPECTED[accident], (1,)), ended.stderr
    assert line_of(accident) in finding.places
    if accident != "raise":
        assert line_of("others") in finding.places
