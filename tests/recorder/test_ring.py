"""Entries of the ring, their dumps, and conditions under which a rank must still write one."""

from __future__ import annotations

import os
import pickle
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.flight_recorder.components import builder, config_manager, loader

from gradwire import recorder
from gradwire._processes import wait_until
from gradwire.errors import (
    ArgumentError,
    ArgumentTypeError,
    CollectiveTimeoutError,
)
from gradwire.recorder import black_box, lines
from gradwire.recorder import events as noted
from gradwire.recorder.files import load, loads
from gradwire.recorder.flight_record import await_gloos_ends
from gradwire.testing import run_ranks
from gradwire.testing.ranks import POOL


def every_op():
    x, whole, world = torch.ones(2), torch.ones(4), dist.get_world_size()
    parts, rank = list(torch.ones(2 * world).chunk(world)), dist.get_rank()
    dist.all_reduce(x)
    dist.broadcast(x, 0)
    dist.reduce(x, 0)
    dist.all_gather(parts, x)
    dist.gather(x, parts if rank == 0 else None, 0)
    dist.scatter(x, parts if rank == 0 else None, 0)
    dist.reduce_scatter(x, parts)
    if dist.get_backend() == "shm":  # Gloo of torch 2.11 lacks it
        dist.all_to_all(list(torch.ones(2 * world).chunk(world)), parts)
    dist.all_to_all_single(whole.clone(), whole)
    dist.barrier()
    dist.all_reduce(x.double(), group=dist.new_group([1, 0]))
    dist.all_reduce(x, async_op=True).wait()


def analysed(directory: str):
    arguments = config_manager.JobConfig().parse_args([directory])
    details, version = loader.read_dir(arguments)
    return builder.build_db(details, arguments, version)


@pytest.fixture(autouse=True, scope="module")
def fresh_processes() -> None:
    """Torch keeps the entries of other tests' groups, which have the same names."""
    POOL.close()


@pytest.mark.wide
def test_torchs_analyzer_matches_every_op(each_backend, tmp_path):
    def main():
        every_op()
        return recorder.dump(tmp_path)

    assert run_ranks(main) == [tmp_path / "rank_0", tmp_path / "rank_1"]
    found = analysed(str(tmp_path)).collectives
    assert len(found) >= 12
    assert all(collective.pass_check for collective in found), found
    assert not any(collective.missing_ranks for collective in found), found


def test_entry_has_sizes_line_times_and_waits(tmp_path):
    def main():
        if dist.get_rank() == 1:
            time.sleep(0.2)
        dist.all_reduce(torch.ones(3, dtype=torch.int64))
        recorder.dump(tmp_path)
        return sys._getframe().f_code.co_filename  # newer cloudpickles put another name there

    filename = run_ranks(main, backend="shm")[0]
    entries = load(tmp_path / "rank_0")["entries"]
    entry = entries[-1]
    line = main.__code__.co_firstlineno + 3
    assert entry["frames"] == [{"name": "main", "filename": filename, "line": line}]
    assert entry["input_sizes"] == entry["output_sizes"] == [[3]]
    assert entry["input_dtypes"] == ["Long"]
    assert entry["state"] == "completed"
    assert entry["waits_ns"][1] > 100_000_000
    created, started, ended = (
        entry[f"time_{name}_ns"]
        for name in ("created", "discovered_started", "discovered_completed")
    )
    assert created <= started <= ended


@pytest.mark.wide
def test_dump_has_the_ends_of_awaited_collectives(tmp_path):
    """Gloo's threads record ends later: one in ten to twenty dumps was faster."""

    def main():
        patient = partial(await_gloos_ends, timeout=30)  # however busy the cores are
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(black_box, "await_gloos_ends", patient)
            for _ in range(100):
                dist.barrier()
                last = load(recorder.dump(tmp_path))["entries"][-1]
                assert last["retired"], last

    run_ranks(main, backend="gloo")


@pytest.mark.narrow({"each_backend": ["gloo", "shm"]})
def test_bucket_entries_have_parameters(each_backend, tmp_path):
    def main():
        from gradwire import DistributedDataParallel

        model = DistributedDataParallel(torch.nn.Linear(3, 2))
        model(torch.ones(1, 3)).sum().backward()
        recorder.dump(tmp_path)

    run_ranks(main)
    record = load(tmp_path / "rank_1")
    (entry,) = [e for e in record["entries"] if "parameters" in e]
    assert sorted(entry["parameters"]) == ["bias", "weight"]
    assert entry["step"] == 1
    assert (entry["backend"], entry["op"]) == (each_backend, "all_reduce")


def test_messages_are_separate_from_collectives(tmp_path):
    def main():
        group, x = dist.new_group(timeout=timedelta(seconds=0.5)), torch.ones(2)
        if dist.get_rank() == 0:
            dist.send(x, 1)
        else:
            dist.recv(x, 0)
        if dist.get_rank():
            with pytest.raises(CollectiveTimeoutError):
                dist.recv(x, 0, group)
        recorder.dump(tmp_path)

    run_ranks(main, backend="shm")
    received, late = load(tmp_path / "rank_1")["gradwire"]["messages"]
    assert (received["op"], received["peer"], received["state"]) == ("recv", 0, "completed")
    assert (late["op"], late["state"]) == ("recv", "scheduled")


def test_ring_keeps_no_tensors_and_drops_the_oldest_entry():
    def main():
        recorder.ring.entries = type(recorder.ring.entries)(maxlen=4)
        x = torch.ones(5)
        count = sys.getrefcount(x)
        for _ in range(9):
            dist.all_reduce(x)
        return sys.getrefcount(x) == count, len(recorder.ring.entries), recorder.ring.recorded > 9

    assert run_ranks(main, backend="shm") == [(True, 4, True)] * 2


PACKAGE = """
def op():
    return caller("op", 1)

def wrapped():
    return op()

def in_a_package_alone(run):
    return run()
"""


def test_line_is_the_users_through_any_wrapper(monkeypatch):
    monkeypatch.setattr(lines, "_depths", {})
    monkeypatch.setitem(lines._kinds, "a package", lines._LIBRARY)
    names: dict = {"caller": lines.caller}
    exec(compile(PACKAGE, "a package", "exec"), names)

    def one(way):
        return lines.read_line(names[way]())["name"]

    def other(way):
        return lines.read_line(names["in_a_package_alone"](names[way]))["name"]

    ways = [(one, "op"), (one, "op"), (one, "wrapped"), (other, "wrapped"), (other, "op")] * 2
    assert [f(way) for f, way in ways] == [f.__name__ for f, _ in ways]
    monkeypatch.setitem(lines._kinds, __file__, lines._LIBRARY)
    with ThreadPoolExecutor() as pool:  # a thread has no frames of the user's
        assert pool.submit(one, "op").result() == "op"


def test_pickles_with_names_are_rejected(tmp_path):
    class Bad:
        def __reduce__(self):
            return os.system, ("true",)

    for data in (pickle.dumps({"entries": [Bad()]}), b"", b"no pickle", pickle.dumps([1])):
        with pytest.raises(ArgumentError, match="not a dump"):
            loads(data)
    (tmp_path / "rank_0").write_bytes(pickle.dumps({"entries": 3}))
    with pytest.raises(ArgumentError, match="rank_0: not a dump"):
        load(tmp_path / "rank_0")


def test_wrong_arguments(tmp_path, monkeypatch):
    with pytest.raises(ArgumentTypeError, match="directory is 3"):
        recorder.start(3)
    with pytest.raises(ArgumentError, match="directory is None"):
        recorder.dump()
    recorder.start(tmp_path / "a")
    try:
        recorder.start(tmp_path / "a")  # no effect
        with pytest.raises(ArgumentError, match="already"):
            recorder.start(tmp_path / "b")
    finally:
        recorder.stop()
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("value", ["", "0"])
def test_empty_or_zero_variable_disables_dumps(tmp_path, monkeypatch, value):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GRADWIRE_RECORDER", value)
    black_box.start_from_environment()
    assert not black_box._box
    assert not list(tmp_path.iterdir())


# -- black box ------------------------------------------------------------------------------------


def test_relative_directory_is_resolved_at_start(tmp_path):
    (tmp_path / "outputs").mkdir()

    def main():
        with_it = os.getcwd()
        os.chdir(tmp_path)
        try:
            recorder.start("dumps")
            recorder.start("dumps")  # the same
            os.chdir("outputs")
            path = recorder.dump()
        finally:
            recorder.stop()
            os.chdir(with_it)
        return path

    assert run_ranks(main, world_size=1, backend="shm") == [tmp_path / "dumps" / "rank_0"]


def test_processes_with_equal_pids_share_a_directory(tmp_path):
    """Rank 1 writes its dump while rank 0 is about to rename its own."""

    def main():
        replace = os.replace
        own = os.getpid
        os.getpid = lambda: 7  # equal in each container

        def replace_late(*paths):
            if dist.get_rank() == 0:
                dist.barrier()  # rank 1 has written its part
                dist.barrier()
            else:
                dist.barrier()
            replace(*paths)
            if dist.get_rank() == 1:
                dist.barrier()

        black_box.os.replace = replace_late
        try:
            recorder.dump(tmp_path)
        finally:
            os.getpid, black_box.os.replace = own, replace

    run_ranks(main, backend="shm")
    assert [load(tmp_path / f"rank_{rank}")["gradwire"]["rank"] for rank in (0, 1)] == [0, 1]
    assert not list(tmp_path.glob(".*"))


class OfTheUser(Exception):
    """Exception with its own attributes and message."""

    def __init__(self, parameters: object) -> None:
        super().__init__("of the user")
        self.parameters = parameters


class Speechless(Exception):
    def __str__(self) -> str:
        raise ValueError


def test_errors_with_unusual_attributes_are_recorded(tmp_path):
    def main():
        had = len(noted.events)
        for error in (OfTheUser(None), OfTheUser(3), OfTheUser([torch.ones(2)]), Speechless()):
            noted.record_error(error, kind="uncaught")
        return load(recorder.dump(tmp_path))["gradwire"]["events"][had:]

    (found,) = run_ranks(main, world_size=1, backend="shm")
    assert [event["type"] for event in found] == ["OfTheUser"] * 3 + ["Speechless"]
    assert [event["parameters"] for event in found] == [[]] * 4
    assert "str() of this error raised ValueError" in found[3]["message"]


def test_each_error_is_recorded_once_even_at_a_reused_address():
    def main():
        noted.events.clear()  # a worker that is reused has earlier ones
        for number in range(4):
            try:
                raise RuntimeError(number)
            except RuntimeError as error:
                noted.record_error(error)
                noted.record_error(error)
        return [event.message for event in noted.events]

    assert run_ranks(main, world_size=1, backend="shm") == [["0", "1", "2", "3"]]


def test_unwritable_directory_is_a_warning(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("GRADWIRE_RECORDER", str(tmp_path / "file" / "dumps"))
    with pytest.warns(RuntimeWarning, match="GRADWIRE_RECORDER is .* cannot be written to"):
        black_box.start_from_environment()
    assert not black_box._box


def test_stop_in_a_fork_leaves_the_parents_recorder(tmp_path):
    def main():
        recorder.start(tmp_path)
        try:
            pid = os.fork()
            if pid == 0:
                recorder.stop()
                os._exit(0)
            os.waitpid(pid, 0)
            (tmp_path / black_box.REQUEST).write_text("now")
            assert wait_until((tmp_path / "rank_0").exists, 30)
        finally:
            recorder.stop()

    run_ranks(main, world_size=1, backend="shm", timeout=60)
