"""Evidence that does not depend on a rank's cooperation: ring file, stacks, the kernel's view."""

from __future__ import annotations

import ctypes
import errno
import faulthandler
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gradwire import recorder
from gradwire._processes import wait_until
from gradwire.recorder import processes
from gradwire.recorder.black_box import OWNER
from gradwire.recorder.crash_files import CrashFiles
from gradwire.recorder.files import SIZE, RingFile, load, read_ring

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")


def fork(run: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            run()
        finally:
            os._exit(0)
    return pid


def end(pid: int) -> int:
    os.kill(pid, signal.SIGKILL)
    return os.waitpid(pid, 0)[1]


def here() -> tuple[object, int]:
    frame = sys._getframe()
    return frame.f_code, frame.f_lasti


def test_ring_file_survives_sigkill(tmp_path):
    def run():
        file = RingFile(tmp_path / "ring-3")
        for number in range(1, 601):
            index = file.begin(number, "all_reduce", *here(), time.perf_counter_ns())
            if number < 600:
                file.integers[index] = time.perf_counter_ns()
        file.beat({"counts": {"0": 600}, "stack": []})
        os.kill(os.getpid(), signal.SIGKILL)

    before = time.time_ns()
    pid = fork(run)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    found = read_ring(tmp_path / "ring-3")
    assert found["pid"] == pid
    assert found["state"]["counts"] == {"0": 600}
    assert before < found["beat"] < time.time_ns()
    assert [call["number"] for call in found["calls"]] == list(range(89, 601))
    last, before_last = found["calls"][-1], found["calls"][-2]
    assert (last["op"], last["end"]) == ("all_reduce", 0)
    assert last["line"]["name"] == "here"
    assert before < before_last["begin"] <= before_last["end"] < time.time_ns()


def test_ring_file_has_its_space_from_the_start(tmp_path):
    """Writing to a page for which a full disk has no room would end the process by SIGBUS."""
    file = RingFile(tmp_path / "ring-0")
    assert (tmp_path / "ring-0").stat().st_blocks * 512 >= SIZE
    file.close()


def test_a_full_disk_leaves_out_the_ring_file(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    files = CrashFiles(tmp_path)
    files.start()
    files.announce(0)
    files.beat()
    assert recorder.ring.file is None
    assert read_ring(tmp_path / "ring-0") is None
    files.stop()


@pytest.mark.parametrize("content", [b"", b"gwring2\0", b"x" * 1000])
def test_other_files_are_no_ring(tmp_path, content):
    (tmp_path / "ring-0").write_bytes(content)
    assert read_ring(tmp_path / "ring-0") is None
    assert read_ring(tmp_path / "none") is None


def test_stacks_of_a_process_whose_gil_is_held(tmp_path):
    file = tmp_path / "stacks"

    def hold_the_gil():
        ctypes.PyDLL(None).sleep(60)

    def run():
        faulthandler.register(processes.STACKS_SIGNAL, file.open("a"), all_threads=True)
        (tmp_path / "ready").touch()
        hold_the_gil()

    pid = fork(run)
    try:
        assert wait_until((tmp_path / "ready").exists, 20)
        assert wait_until(lambda: "hold_the_gil" in processes.ask_for_stacks(pid, file), 20)
    finally:
        end(pid)


def test_process_without_a_handler_gets_no_signal(tmp_path):
    pid = fork(lambda: time.sleep(60))
    try:
        (tmp_path / "stacks").touch()
        assert processes.ask_for_stacks(pid, tmp_path / "stacks") == ""
        assert os.waitpid(pid, os.WNOHANG) == (0, 0)
    finally:
        end(pid)


def recorded(directory: Path, run: Callable[[], None]) -> int:
    """Run as rank 0 with a recorder, in a fork, and return its exit code."""

    def be_rank():
        faulthandler.disable()  # pytest's
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        os.environ |= {"RANK": "0", OWNER: str(os.getpid())}
        recorder.start(directory)
        assert wait_until(lambda: bool([*directory.glob("ring-0")]), 20)
        run()

    return os.waitstatus_to_exitcode(os.waitpid(fork(be_rank), 0)[1])


def abort_in_c():
    """Abort as Gloo does: without the GIL, in a thread that Python does not know."""
    libc = ctypes.CDLL(None)
    libc.pthread_create.argtypes = [ctypes.c_void_p] * 4
    thread = ctypes.c_void_p()
    libc.pthread_create(ctypes.byref(thread), None, ctypes.cast(libc.abort, ctypes.c_void_p), None)
    time.sleep(60)


def test_a_process_that_c_code_aborts_leaves_a_dump(tmp_path):
    assert recorded(tmp_path, abort_in_c) == -signal.SIGABRT
    found = load(tmp_path / "rank_0")["gradwire"]
    assert (found["rank"], found["reason"]) == (0, "crash")
    stack = next(iter(found["threads"].values()))
    assert "abort_in_c" in [frame["name"] for frame in stack]


def test_the_abort_of_a_fork_does_not_end_its_rank(tmp_path):
    def run():
        assert os.waitstatus_to_exitcode(os.waitpid(fork(os.abort), 0)[1]) == -signal.SIGABRT
        time.sleep(0.5)  # the recorder's thread looks every 0.2 s
        assert not (tmp_path / "crash-0.txt").stat().st_size
        recorder.stop()
        os._exit(7)

    assert recorded(tmp_path, run) == 7


@pytest.mark.wide  # 6 s
def test_a_process_that_holds_the_gil_ends_all_the_same(tmp_path):
    assert recorded(tmp_path, os.abort) == -signal.SIGABRT
    assert not (tmp_path / "rank_0").exists()
