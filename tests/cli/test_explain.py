"""`gradwire explain` on synthetic dumps: text, JSON and exit codes."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import time
import tracemalloc

import pytest
from click.testing import CliRunner

from gradwire.cli.app import app
from gradwire.cli.explain import directories

FILE = "/home/me/train.py"


def entry(number, op="all_reduce", size=4, line=10, *, group="0", done=True, at=None):
    """Return an entry in the format of torch's recorder for Gloo."""
    created = (number if at is None else at) * 1_000_000
    return {
        "record_id": number,
        "process_group": (group, "default_pg" if group == "0" else "undefined"),
        "collective_seq_id": number,
        "p2p_seq_id": 0,
        "profiling_name": f"gloo:{op}",
        "time_created_ns": created,
        "time_discovered_started_ns": None,
        "time_discovered_completed_ns": None,
        "state": "scheduled",
        "input_sizes": [[size]],
        "input_dtypes": ["Float"],
        "output_sizes": [[size]],
        "output_dtypes": ["Float"],
        "retired": done,
        "is_p2p": False,
        "frames": [{"name": "step", "filename": FILE, "line": line}],
    }


def write(directory, *ranks, prefix="nccl_trace_rank_"):
    for rank, entries in enumerate(ranks):
        record = {"version": "2.10", "pg_config": {}, "entries": entries}
        (directory / f"{prefix}{rank}").write_bytes(pickle.dumps(record))


def explained(directory, *options):
    result = CliRunner().invoke(app, ["explain", str(directory), *options])
    return result.exit_code, result.output


def test_torchs_dumps_without_groups(tmp_path):
    """Torch 2.13 writes an empty configuration of groups for Gloo."""
    whole = [entry(1), entry(2), entry(3, done=False)]
    write(tmp_path, whole, whole[:2], whole)
    code, out = explained(tmp_path)
    assert code == 1
    who, where, why, do, *details = out.splitlines()
    assert who == "Who    rank 1"
    assert where == "Where  /home/me/train.py:10"
    assert why.startswith("Why    missing: rank 1 did not call the all_reduce of [4] Float ")
    assert do.startswith("Do     find out what that line waits for")
    assert details[-1].startswith("  3 dumps of 3 ranks; dumps of torch's own recorder")
    code, out = explained(tmp_path, "--json", "--prefix", "nccl_trace_rank_")
    found = json.loads(out)
    assert (code, found["findings"][0]["ranks"], found["dumps"]) == (1, [1], [0, 1, 2])


def test_crash_of_a_process_that_left_no_dump(tmp_path):
    same = [entry(1), entry(2)]
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2]"}}
    for rank in range(2):
        record = {"version": "2.10", "pg_config": config}
        record["entries"] = [*same, entry(3, done=False)]
        (tmp_path / f"rank_{rank}").write_bytes(pickle.dumps(record))
    threads = [("Thread", "/lib/python3/threading.py", 3), ("Current thread", FILE, 10)]
    threads += [("Thread", FILE, 9)]  # the main thread comes last
    report = "Fatal Python error: Segmentation fault\n\n" + "\n\n".join(
        f'{name} 0x1 (most recent call first):\n  File "{file}", line {line} in step'
        for name, file, line in threads
    )
    (tmp_path / "crash-2.txt").write_text(report)
    first = json.loads(explained(tmp_path, "--json")[1])["findings"][0]
    assert (first["kind"], first["ranks"]) == ("crashed", [2])
    assert first["places"] == ["/home/me/train.py:10"]


def test_slow_rank_without_failure(tmp_path):
    ranks = [[entry(n, at=1000 * n) for n in range(1, 9)] for _ in range(2)]
    write(tmp_path, *ranks)
    code, out = explained(tmp_path)
    assert code == 0
    assert out.startswith("nothing: nothing failed, and no rank was late for long (16 calls)\n")
    write(tmp_path, ranks[0], [entry(n, at=1000 * n + 400) for n in range(1, 9)])
    code, out = explained(tmp_path)
    assert code == 0
    assert out.startswith("Who    rank 1\n")
    assert "\nWhy    slow rank: rank 1 was slow: it was last in 8 of 8" in out
    assert "\x1b" not in out


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (None, "has no dumps"),
        (b"", "not a dump"),
        (pickle.dumps({"entries": [{}]}), "not in torch's format: KeyError"),
        (pickle.dumps({"entries": [entry(1) | {"input_sizes": 3}]}), "not in torch's format"),
    ],
)
def test_files_that_are_not_dumps(tmp_path, data, said):
    if data is not None:
        (tmp_path / "rank_0").write_bytes(data)
    code, out = explained(tmp_path)
    assert code == 2
    assert said in " ".join(out.split())


def test_many_ranks_are_told_in_a_few_lines(tmp_path):
    """One line says why torchrun's block names another rank."""
    from rich.console import Console

    from gradwire.cli.explain import show_verdict
    from gradwire.recorder.verdict import explain

    calls = [[entry(1), entry(2), entry(3, line=n, done=False)] for n in range(64)]
    write(tmp_path, *calls[:7], calls[7][:2], *calls[8:])
    console = Console(highlight=False, width=40)
    with console.capture() as captured:
        show_verdict(console, explain(tmp_path), torchruns=0)
    first, rest = captured.get().splitlines()[:4], captured.get().splitlines()[4:]
    assert [line.split()[0] for line in first] == ["Who", "Where", "Why", "Do"]
    assert "ranks 0 to 6 and 8 to 63 wait" in first[2]
    assert rest[0].startswith("  torchrun's block above names rank 0, whose process ended first")
    assert len(rest) <= 10


def nested() -> list:
    """Return an object that is small in a pickle and endless as text."""
    found: list = ["x"]
    for _ in range(40):
        found = [found, found]
    return found


LINE = {"name": "step", "filename": FILE, "line": 1}
EVENT = {"kind": "uncaught", "type": "KeyError", "message": "", "parameters": [], "time": 1}


@pytest.mark.parametrize(
    "wrong",
    [
        {"entries": [entry(1) | {"collective_seq_id": float("inf")}]},
        {"entries": [entry(1) | {"op": nested()}]},
        {"entries": [entry(1) | {"step": nested()}]},
        {"entries": [], "pg_config": {"0": {"desc": "", "ranks": "-" * 500_000 + "1"}}},
        {"entries": [], "gradwire": {"threads": {"MainThread": ["x"]}}},
        {"entries": [], "gradwire": {"messages": [{"op": "recv", "peer": 1, "frames": []}]}},
        {"entries": [], "gradwire": {"messages": ["x"]}},
        {"entries": [], "gradwire": {"events": [EVENT | {"lines": [{"line": 3}]}]}},
        {"entries": [], "gradwire": {"events": [EVENT | {"lines": [LINE], "type": nested()}]}},
    ],
)
def test_field_of_a_wrong_type_does_not_hide_other_dumps(tmp_path, wrong):
    whole = [entry(1), entry(2), entry(3, done=False)]
    write(tmp_path, whole, whole[:2], whole, whole)
    (tmp_path / "nccl_trace_rank_3").write_bytes(pickle.dumps(wrong))
    (tmp_path / "exits-0.json").write_text('{"3": {"code": "x", "time": 1}}')
    code, out = explained(tmp_path, "--json")
    verdict = json.loads(out)
    assert (code, verdict["findings"][0]["ranks"]) == (1, [1])
    assert "the dumps of rank 3 cannot be read" in verdict["notes"]


def test_damaged_pickle_allocates_no_memory(tmp_path):
    whole = [entry(1), entry(2), entry(3, done=False)]
    write(tmp_path, whole, whole[:2], whole, whole)
    memo = b"\x80\x02]r\xff\xff\xff\x00."
    array = b"\x80\x05\x96" + (1 << 28).to_bytes(8, "little")
    for data in (memo, array):
        (tmp_path / "nccl_trace_rank_3").write_bytes(data)
        tracemalloc.start()
        try:
            code, out = explained(tmp_path, "--json")
            assert tracemalloc.get_traced_memory()[1] < 1 << 26
        finally:
            tracemalloc.stop()
        assert (code, json.loads(out)["findings"][0]["ranks"]) == (1, [1])


def test_dumps_and_traces_are_read_without_torch(run, tmp_path):
    """To import it takes longer than the rest."""
    whole = [entry(1), entry(2), entry(3, done=False)]
    write(tmp_path, whole, whole[:2], whole)
    made = {"made by": "gradwire", "ranks": [0], "clock error, us": {"0": 0.0}}
    trace = tmp_path / "run.json"
    trace.write_text(json.dumps({"traceEvents": [], "otherData": made}))
    script = """
import sys
from gradwire.cli import main
dumps, trace = sys.argv[1:]
for arguments in (["explain", dumps], ["timeline", trace, "--html", trace + ".html"]):
    sys.argv = ["gradwire", *arguments]
    try:
        main()
    except SystemExit as end:
        print(end.code)
print("torch" in sys.modules)
"""
    ended = run(script, args=[str(tmp_path), str(trace)])
    assert "rank 1 did not call" in ended.stdout, ended.stderr
    assert ended.stdout.splitlines()[-2:] == ["0", "False"], ended.stdout + ended.stderr


# -- a job that hangs is explained, and goes on


pytestmark = pytest.mark.timeout(200)
HANGS = """
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
    program.write_text(HANGS)
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
        line = HANGS.splitlines().index("    time.sleep(0.05)  # here") + 1
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
