"""`gradwire run`: an unmodified program on gradwire, and cleanup."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from gradwire._processes import ENDED, stat_of, wait_until
from gradwire.cli import run_launch
from gradwire.cli import run_launch as launch
from gradwire.cli.app import app
from gradwire.cli.run import parse_options
from gradwire.cli.run_launch import FOLDER, collecting_agent
from gradwire.errors import ArgumentError

PROGRAM = """
import sys, time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 4))
for step in range(3):
    model(torch.ones(2, 4)).sum().backward()
members = [None] * dist.get_world_size()
dist.all_gather_object(members, type(model).__module__)
if dist.get_rank() == 0:
    from gradwire.shm import shares_memory
    print(members, dist.get_backend(), shares_memory(dist.group.WORLD), sys.argv[1:], flush=True)
if "fail" in sys.argv and dist.get_rank() == 1:
    raise KeyError("here")
while "wait" in sys.argv:
    time.sleep(0.1)
"""
RUN = ("-m", "gradwire", "run", "--standalone", "--nproc-per-node", "2")


def left_in(folder: Path) -> list[Path]:
    """Return what a command has left in a folder, without PyTorch's own cache."""
    return [path for path in folder.iterdir() if not path.name.startswith("torchinductor_")]


@pytest.fixture
def program(tmp_path: Path) -> Path:
    file = tmp_path / "train.py"
    file.write_text(PROGRAM)
    return file


@pytest.fixture
def environment(site, tmp_path, monkeypatch) -> Path:
    """Set up an environment with gradwire installed; return its temporary directory."""
    paths = [str(site), str(Path(__file__).parents[2] / "src")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    place = tmp_path / "temporary"
    place.mkdir()
    monkeypatch.setenv("TMPDIR", str(place))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return place


def test_options_of_torchrun_gradwire_and_program():
    line = "--nnodes 2 --backend shm --recorder d train.py --backend gloo --compat"
    options = parse_options(line.split(" "))
    assert (options.nnodes, options.backend, options.recorder) == ("2", "shm", "d")
    assert not options.compat
    assert options.training_script_args == ["--backend", "gloo", "--compat"]


def test_missing_autoload_is_reported(monkeypatch):
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    with pytest.raises(ArgumentError, match="TORCH_DEVICE_BACKEND_AUTOLOAD is '0'"):
        launch._check_autoload()
    monkeypatch.setattr(launch, "entry_points", lambda group: [])
    with pytest.raises(ArgumentError, match="gradwire is not installed"):
        launch._check_autoload()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nosuch.py"], "PROGRAM is 'nosuch.py', which does not exist in"),
        (["--nproc-per-node", "0", __file__], "--nproc-per-node is 0: pass at least 1"),
        (["--nproc-per-node", "x", __file__], "--nproc-per-node is 'x': Unsupported"),
        (["--nproc-per-node", "2"], "PROGRAM is missing: pass a Python file, or -m and a module"),
        ([], "PROGRAM is missing: pass a Python file, or -m and a module"),
        (["--nproc-per-node", "2", "--elastic", __file__], "`gradwire run --elastic ...`"),
        (["--max-restarts", "x", __file__], "argument --max-restarts/--max_restarts: invalid int"),
    ],
)
def test_invalid_programs_are_rejected_before_start(arguments, message):
    result = CliRunner().invoke(app, ["run", *arguments])
    assert result.exit_code == 2
    assert message in result.output
    assert "run [OPTIONS] PROGRAM [ARGUMENTS...]\n" in result.output


def test_only_files_of_an_earlier_run_are_removed(tmp_path):
    """The directory of dumps may also contain checkpoints."""
    theirs = {"rank_0.pt", "rank_1_optimizer", "crash-course.txt", "process-list.json", "requests"}
    ours = {"rank_0", "rank_12", "process-me-7.json", "crash-1.txt", "exits-0.json", "request"}
    for name in theirs | ours | {"crash-of-process-host-7.txt", ".1.234.0.part", "run.json.1.part"}:
        (tmp_path / name).write_text("")
    (tmp_path / "rank_3").mkdir()
    launch.empty(tmp_path)
    launch._prepare(tmp_path / "run.json")
    assert {path.name for path in tmp_path.iterdir()} == theirs | {"rank_3"}
    with pytest.raises(ArgumentError, match="whose folder does not exist"):
        launch._prepare(tmp_path / "none" / "run.json")


class Started:
    """Worker group of torchrun's agent whose processes have failed."""

    def __init__(self, directory, monkeypatch, world_size=1):
        kind = collecting_agent(directory)
        self.agent, self.ended = kind.__new__(kind), []
        self.world_size = world_size
        monkeypatch.setattr(LocalElasticAgent, "_start_workers", lambda agent, group: {})
        self.start()

    def start(self):
        handler = SimpleNamespace(proc=SimpleNamespace(poll=lambda: 1, pid=os.getpid()))
        ranks = range(self.world_size)
        self.agent._pcontext = SimpleNamespace(
            subprocess_handlers=dict.fromkeys(ranks, handler), close=self.ended.append
        )
        size = {"world_size": self.world_size}
        workers = [SimpleNamespace(local_rank=r, global_rank=r, **size) for r in ranks]
        self.agent._start_workers(SimpleNamespace(workers=workers, group_rank=0))


def test_exits_before_a_restart_are_removed(tmp_path, monkeypatch):
    group = Started(tmp_path, monkeypatch, world_size=2)
    group.agent._pcontext.close("now")
    assert set(json.loads((tmp_path / "exits-0.json").read_text())) == {"0", "1"}
    for name in ("rank_0", "rank_1", "process-h-1.json", "crash-0.txt", "crash-1.txt", "rank_1.pt"):
        (tmp_path / name).write_text("")
    group.world_size = 1  # a host was lost
    group.start()
    assert {path.name for path in tmp_path.iterdir()} == {"rank_0", "rank_1.pt"}


@pytest.mark.wide
def test_unmodified_program_runs_on_gradwire(command, program, environment, tmp_path, monkeypatch):
    dumps = tmp_path / "dumps"
    dumps.mkdir()
    (dumps / "rank_7").write_text("of an earlier run")
    trace = tmp_path / "run.json"
    options = ("--compat", "--backend", "shm", "--recorder", str(dumps), "--timeline", str(trace))
    monkeypatch.delenv("OMP_NUM_THREADS")
    code, out, err = command(*RUN, *options, str(program), "--epochs", "3").end()
    assert code == 0, err
    assert "OMP_NUM_THREADS" not in err
    assert "['gradwire.compat.ddp', 'gradwire.compat.ddp'] gloo True ['--epochs', '3']" in out
    assert {path.name for path in dumps.glob("rank_*")} == {"rank_0", "rank_1"}
    assert not [*dumps.glob("crash-*"), *dumps.glob("stacks-*")]  # of ranks that do not end well
    events = json.loads(trace.read_text())["traceEvents"]
    assert {e["pid"] for e in events if e["name"] == "backward"} == {0, 1}
    assert list(tmp_path.glob("run.json.*")) == []
    assert left_in(environment) == []


@pytest.mark.wide
def test_a_run_records_by_default_and_prints_the_verdict(command, program, environment):
    ended = command(*RUN, str(program), "fail")
    code, _, err = ended.end()
    assert code == 1
    (kept,) = left_in(environment)
    assert kept.name.startswith(FOLDER)
    verdict = err[err.rindex("rank 1 failed") :]
    assert "KeyError" in verdict
    assert "Traceback" not in verdict
    assert f"gradwire explain {kept}" in verdict
    assert ended.survivors() == {}
    code, out, _ = command("-m", "gradwire", "explain", str(kept), "--json").end()
    first = json.loads(out)["findings"][0]
    assert (code, first["kind"], first["ranks"]) == (1, "error", [1])
    assert "KeyError" in first["summary"]
    shutil.rmtree(kept)
    assert command(*RUN, str(program)).end()[0] == 0
    assert left_in(environment) == []  # kept only after a failure


@pytest.mark.parametrize(
    ("options", "records"), [((), True), (("--nnodes", "1"), True), (("--nnodes", "2"), False)]
)
def test_only_runs_on_one_host_record_by_default(options, records, environment, monkeypatch):
    monkeypatch.delenv("GRADWIRE_RECORDER", raising=False)
    monkeypatch.setattr(run_launch, "_check_autoload", lambda: None)
    assert run_launch.records_by_default(parse_options([*options, __file__])) == records


@pytest.mark.wide
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_rank_outlives_its_launcher(command, program, environment, number):
    """Those of torchrun outlive one that is killed."""
    started = command(*RUN, "--compat", "--backend", "shm", str(program), "wait")
    started.read_until("gloo True")
    ranks = children_of(started.process.pid)
    assert len(ranks) == 2
    os.kill(started.process.pid, number)
    code, _, err = started.end()
    assert wait_until(
        lambda: all(getattr(stat_of(pid), "state", "gone") in ENDED for pid in ranks), 30
    )
    if number != signal.SIGKILL:
        assert code == 128 + number, err
        assert "all ranks of this host have been stopped" in err
        assert not left_in(environment)  # of one that hung, they would show who it waited for


def children_of(pid: int) -> list[int]:
    """Ranks have their own sessions."""
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


FAILING = """
import torch
from gradwire import elastic
net = torch.nn.Linear(2, 1)
run = elastic.join()
run.keep(model=net)
for step in run.steps(3, samples=8, batch=8):
    raise ValueError("bad data")
"""


@pytest.mark.wide
def test_dumps_of_elastic_members_are_explained(command, environment, tmp_path):
    program, dumps = tmp_path / "train.py", tmp_path / "dumps"
    program.write_text(FAILING)
    options = ("--elastic", "--nproc-per-node", "2", "--recorder", str(dumps))
    code, _, err = command("-m", "gradwire", "run", *options, str(program)).end()
    assert code == 1
    assert "[member 1] ValueError: bad data" in err
    assert "every start ended with ValueError: bad data at step 0; exit code 1" in err
    code, out, _ = command("-m", "gradwire", "explain", str(dumps), "--json").end()
    assert code == 1
    assert "ValueError" in json.loads(out)["findings"][0]["summary"]
