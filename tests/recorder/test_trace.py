"""Timelines: lanes of both ranks on one clock, summary and page."""

from __future__ import annotations

import gc
import json
import threading
import time
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner

import gradwire
from gradwire._processes import wait_until
from gradwire.cli.app import app
from gradwire.errors import ArgumentError, ArgumentTypeError
from gradwire.recorder.trace import page_of, read_trace, summarize
from gradwire.recorder.tracing import find_offset
from gradwire.testing import run_ranks

STEPS = 3


def spin(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def train(path):
    heap = [[n] for n in range(100_000)]  # collecting it takes more than 1 ms
    model = gradwire.DistributedDataParallel(torch.nn.Linear(4, 4))
    with gradwire.timeline(path):
        for step in range(STEPS):
            if dist.get_rank() == 1:
                time.sleep(0.03)
                if step == 1:
                    spin(0.05)
                    gc.collect()
            model(torch.ones(2, 4)).sum().backward()
            model.zero_grad()
    assert heap


@pytest.fixture(scope="module")
def trace(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("trace") / "run.json"
    run_ranks(train, args=(path,), backend="shm")
    assert [file.name for file in path.parent.iterdir()] == ["run.json"]  # and no parts
    return path


def test_ranks_have_lanes_on_one_clock(trace):
    data = json.loads(trace.read_text())
    names = [e["args"]["name"] for e in data["traceEvents"] if e["name"] == "process_name"]
    assert names == ["rank 0", "rank 1"]
    slices = [e for e in data["traceEvents"] if e["ph"] == "X"]
    assert all({"pid", "tid", "ts", "dur", "name", "args"} <= e.keys() for e in slices)
    assert min(e["ts"] for e in slices) == 0
    for rank in (0, 1):
        own = [e for e in slices if e["pid"] == rank]
        backwards = [e for e in own if e["name"] == "backward"]
        assert [e["args"]["step"] for e in backwards] == [1, 2, 3]
        parts = [e for e in own if e["tid"] == 1 and e["args"]["step"] == 1]
        assert [e["name"] for e in parts] == [
            f"bucket 0: {x}" for x in ("pack", "send", "in flight")
        ]
        assert sorted(parts[0]["args"]["parameters"]) == ["bias", "weight"]
        for first, second in pairwise(parts):
            assert first["ts"] + first["dur"] == pytest.approx(second["ts"], abs=0.01)
    reduced = [e for e in slices if e["name"] == "all_reduce"]
    # a collective overlaps on both ranks, since they share a clock
    for mine in (e for e in reduced if e["pid"] == 0):
        theirs = next(
            e for e in reduced if e["pid"] == 1 and e["args"]["number"] == mine["args"]["number"]
        )
        assert mine["ts"] < theirs["ts"] + theirs["dur"]
        assert theirs["ts"] < mine["ts"] + mine["dur"]


def test_summary_names_the_rank_that_others_waited_for(trace):
    summary = summarize(read_trace(trace))
    assert summary.waited_for is not None
    assert summary.waited_for.rank == 1
    first, second = summary.ranks
    assert first.steps == second.steps == STEPS
    assert first.waited == second.waited_for > 1000 * (STEPS - 1) * 0.03 * 0.9
    assert second.between > 25  # it sleeps; the other one's time depends on the machine
    assert first.between > 0
    assert second.collected > 1
    assert first.sent_mb == second.sent_mb > 0
    assert [sorted(b.parameters) for b in summary.buckets][:1] == [["bias", "weight"]]


def test_steps_tell_cpu_time_and_time_between(trace):
    slices = [e for e in json.loads(trace.read_text())["traceEvents"] if e["ph"] == "X"]
    own = [e for e in slices if e["pid"] == 1 and e["tid"] == 0]
    between = [e for e in own if e["name"] == "between steps"]
    assert [e["args"]["step"] for e in between] == [2, 3]
    assert min(e["dur"] for e in between) > 29e3
    cpu = {e["args"]["step"]: e["args"].get("cpu us") for e in own if e["name"] == "backward"}
    assert cpu[1] is None
    assert cpu[2] >= 50e3
    (collection,) = (e for e in own if e["name"] == "garbage collection")
    assert between[0]["ts"] < collection["ts"]
    assert collection["ts"] + collection["dur"] < between[0]["ts"] + between[0]["dur"]


def test_command(trace, tmp_path):
    page = tmp_path / "run.html"
    result = CliRunner().invoke(app, ["timeline", str(trace), "--html", str(page)])
    assert result.exit_code == 0, result.output
    assert "The others waited for rank 1 longest: " in result.stdout
    assert "bias, weight" in result.stdout
    assert "http" not in page.read_text().replace("http-equiv", "").replace("http://www.w3.org", "")
    result = CliRunner().invoke(app, ["timeline", str(trace), "--json"])
    assert [rank["rank"] for rank in json.loads(result.stdout)["ranks"]] == [0, 1]
    other = tmp_path / "other.json"
    other.write_text("{}")
    result = CliRunner().invoke(app, ["timeline", str(other)])
    assert result.exit_code == 2
    assert "is not a trace of gradwire.timeline" in " ".join(result.output.split())


def test_truncated_trace_is_reported(tmp_path, monkeypatch):
    def main():
        with monkeypatch.context() as patch:
            patch.setattr("gradwire.recorder.tracing._MOST", 2)
            train(tmp_path / "run.json")

    run_ranks(main, world_size=1, backend="shm")
    trace = read_trace(tmp_path / "run.json")
    left_out = summarize(trace).left_out
    assert left_out > 0
    assert f'"left_out":{left_out}' in page_of(trace, "run")
    result = CliRunner().invoke(app, ["timeline", str(tmp_path / "run.json")])
    assert f"Truncated: {left_out} records at the end are missing" in result.stdout


def test_part_files_of_an_earlier_run_are_ignored(tmp_path):
    """The earlier run was killed before rank 0 merged its parts; now rank 0 ends first."""
    path = tmp_path / "run.json"
    earlier = json.dumps({"rank": 1, "events": [], "error_us": 12345.0})

    def main():
        if dist.get_rank() == 1:
            path.with_name("run.json.1.part").write_text(earlier)
        dist.barrier()
        with gradwire.timeline(path):
            if dist.get_rank() == 1:
                assert wait_until(path.with_name("run.json.0.part").exists, 30)

    run_ranks(main, backend="shm")
    assert json.loads(path.read_text())["otherData"]["clock error, us"] == {"0": 0, "1": 0}
    assert [file.name for file in tmp_path.iterdir()] == ["run.json"]


def test_names_cannot_end_the_pages_script():
    event = {"ph": "X", "pid": 0, "tid": 0, "ts": 0, "dur": 1, "name": "</script><b>", "args": {}}
    trace = {"traceEvents": [event], "otherData": {"ranks": [0], "clock error, us": {"0": 0}}}
    assert "<title>DATA.json</title>" in page_of(trace, "DATA.json")
    page = page_of(trace, "<i>")
    assert page.count("</script>") == 1
    assert "<i>" not in page


def test_wrong_arguments(tmp_path):
    with pytest.raises(ArgumentTypeError, match="path is 3"), gradwire.timeline(3):
        pass
    with pytest.raises(ArgumentError, match="no default group"), gradwire.timeline("run.json"):
        pass

    def main():
        missing = tmp_path / "none" / "run.json"
        with pytest.raises(ArgumentError, match="does not exist"), gradwire.timeline(missing):
            pass
        inner = gradwire.timeline(tmp_path / "other.json")
        with (
            gradwire.timeline(tmp_path / "run.json"),
            pytest.raises(ArgumentError, match="already"),
            inner,
        ):
            pass

    run_ranks(main)


@pytest.mark.parametrize("skew", [0, 12_345_678, -5_000_000_000])
def test_clock_offset_between_hosts_is_within_its_error(skew):
    store = dist.HashStore()
    found = {}

    def be(rank: int, name: str, ahead: int) -> None:
        def now() -> int:
            return time.perf_counter_ns() + ahead

        found[rank] = find_offset(store, rank, 3, name, now=now)

    clocks = {0: ("a", 0), 1: ("b", skew), 2: ("a", 0)}
    threads = [threading.Thread(target=be, args=(rank, *clock)) for rank, clock in clocks.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found[0].ns == found[2].ns == found[2].error_ns == 0
    assert abs(found[1].ns + skew) <= found[1].error_ns
