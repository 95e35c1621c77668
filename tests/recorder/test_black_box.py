"""Directories of dumps, and conditions under which a rank must still write its dump."""

from __future__ import annotations

import os
import pickle
import resource
import signal
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from gradwire import recorder
from gradwire._processes import wait_until
from gradwire.recorder import black_box
from gradwire.recorder import events as noted
from gradwire.recorder.events import came_from_loading, came_from_waiting
from gradwire.recorder.files import load
from gradwire.testing import run_ranks


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_repeated_dumps_leave_no_file_open(tmp_path):
    def main():
        recorder.dump(tmp_path)
        before = open_files()
        for _ in range(5):
            recorder.dump(tmp_path)
        return open_files() - before

    assert run_ranks(main, world_size=1, backend="shm") == [0]


def test_start_and_stop_leave_no_file_open(tmp_path):
    def main():
        before, threads = open_files(), threading.active_count()
        for _ in range(3):
            recorder.start(tmp_path)
            recorder.stop()
        assert wait_until(lambda: threading.active_count() <= threads, 30)
        return open_files() - before

    assert run_ranks(main, world_size=1, backend="shm") == [0]


def test_start_with_more_than_1024_open_files(tmp_path):
    def main():
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if hard != resource.RLIM_INFINITY and hard < 1200:
            pytest.skip("this process may not open so many files")
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1200), hard))
        held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1030)]
        try:
            recorder.start(tmp_path)
            os.kill(os.getpid(), signal.SIGUSR2)
            assert wait_until(lambda: bool(list(tmp_path.glob("*rank*"))), 30)
        finally:
            recorder.stop()
            for file in held:
                os.close(file)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    run_ranks(main, world_size=1, backend="shm")


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


def test_non_numeric_launcher_variable_is_ignored(tmp_path):
    def main():
        os.environ["WORLD_SIZE"] = "two"
        dist.destroy_process_group()
        return recorder.dump(tmp_path).name

    assert run_ranks(main, world_size=1, backend="shm") == ["rank_0"]


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


def test_raising_signal_handler_does_not_stop_a_dump(tmp_path):
    """The handler of a data loader raises once for each dead worker."""

    def main():
        recorder.start(tmp_path)
        write = black_box.pickle.dumps
        left = [RuntimeError("DataLoader worker is killed"), KeyError("of another handler")]

        def interrupted(*arguments, **options):
            if left:
                raise left.pop()
            return write(*arguments, **options)

        black_box.pickle.dumps = interrupted
        try:
            error = ValueError("the program's")
            noted.record_error(error, kind="uncaught")
        finally:
            black_box.pickle.dumps = write
            recorder.stop()
        return [event["message"] for event in load(tmp_path / "rank_0")["gradwire"]["events"]]

    assert run_ranks(main, world_size=1, backend="shm")[0][-1:] == ["the program's"]
    assert (tmp_path / black_box.REQUEST).exists()


def test_data_loader_errors_are_recognized():
    handler = Path(torch.utils.data.__file__).parent / "_utils" / "signal_handling.py"
    names: dict = {}
    exec(compile("def handler(): int('none')", str(handler), "exec"), names)
    for raises, own in ((names["handler"], True), (lambda: int("none"), False)):
        with pytest.raises(ValueError, match="none") as caught:
            raises()
        assert came_from_loading(caught.value) is own


def test_unpicklable_object_is_not_a_wait():
    def main():
        try:
            dist.all_gather_object([None] * 2, lambda: 0 if dist.get_rank() else 3)
        except (AttributeError, TypeError, pickle.PicklingError) as error:
            return came_from_waiting(error)

    assert run_ranks(main, backend="shm") == [False, False]
