"""`gradwire explain --live`: a job that hangs is explained, and goes on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import pytest
from click.testing import CliRunner

from gradwire.cli.app import app
from gradwire.cli.explain import directories

pytestmark = pytest.mark.timeout(200)
PROGRAM = """
import os, sys, time
import torch, torch.distributed as dist
import gradwire

rank = int(os.environ["RANK"])
store = dist.FileStore(sys.argv[1], 2)
dist.init_process_group("shm", store=store, rank=rank, world_size=2)
for _ in range(3):
    dist.all_reduce(torch.ones(2))
print("ready", flush=True)
while rank == 1 and not os.path.exists(sys.argv[2]):
    time.sleep(0.05)  # here
dist.all_reduce(torch.ones(2))
"""


@pytest.fixture
def job(tmp_path):
    """Two ranks, of which rank 1 waits for a file, with the directory and the file."""
    program, dumps, file = tmp_path / "train.py", tmp_path / "dumps", tmp_path / "continue"
    program.write_text(PROGRAM)
    ranks = [
        subprocess.Popen(
            [sys.executable, str(program), str(tmp_path / "store"), str(file)],
            env=os.environ
            | {"RANK": str(rank), "GRADWIRE_RECORDER": str(dumps), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        for rank in ranks:
            assert rank.stdout.readline() == "ready\n"
        yield ranks, dumps, file
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


def test_hanging_job_is_explained_and_goes_on(job):
    ranks, dumps, file = job
    assert dumps in directories("all")
    for target in (str(ranks[0].pid), str(dumps)):
        end = time.monotonic() + 60
        while True:  # a rank has to have waited for a second
            result = CliRunner().invoke(app, ["explain", "--live", target, "--json"])
            first = json.loads(result.stdout)["findings"][0]
            if first["ranks"] or time.monotonic() > end:
                break
        assert (result.exit_code, first["kind"], first["ranks"]) == (1, "missing", [1])
        line = PROGRAM.splitlines().index("    time.sleep(0.05)  # here") + 1
        assert f"train.py:{line}" in first["summary"]
    assert [rank.poll() for rank in ranks] == [None, None]
    file.touch()
    assert [rank.wait(60) for rank in ranks] == [0, 0]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "pass DIRECTORY, or --live"),
        (("--live", "nowhere"), "pass a directory of dumps, a process ID, or all"),
        (("--live", "4194304"), "no process of this host has this ID"),
    ],
)
def test_wrong_arguments(arguments, said):
    result = CliRunner().invoke(app, ["explain", *arguments])
    assert result.exit_code == 2
    assert said in " ".join(result.output.split())


def test_process_without_a_recorder():
    child = subprocess.Popen(["sleep", "60"])
    try:
        result = CliRunner().invoke(app, ["explain", "--live", str(child.pid)])
        assert "does not record. The kernel shows: " in result.output
        assert child.poll() is None
    finally:
        child.kill()
        child.wait()
