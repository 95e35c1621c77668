"""However the process that called `run_ranks` ends, nothing of it stays behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gradwire._processes import ENDED, stat_of, wait_until
from gradwire.testing import run_ranks
from gradwire.testing.ranks import POOL

pytestmark = [
    pytest.mark.timeout(200),
    pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc"),
]

PREAMBLE = """
import ctypes, os, signal, sys, threading, time
import torch
import torch.distributed as dist
from gradwire.testing import run_ranks

def pid():
    return os.getpid()

def reporting(action):
    def fn():
        os.write(1, f"{os.getpid()}\\n".encode())
        action()
    return fn

"""


def alive(pid: int) -> bool:
    return getattr(stat_of(pid), "state", "gone") not in ENDED


def wait_until_gone(pids: list[int]) -> None:
    assert wait_until(lambda: not any(map(alive, pids)), 20)


Start = Callable[[str], "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a script; at the end it must have left no temporary files."""
    processes = []

    def _start(script: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-W", "error", "-c", PREAMBLE + script],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=dict(os.environ, TMPDIR=str(tmp_path)),
        )
        processes.append(process)
        return process

    yield _start
    for process in processes:
        process.kill()
        process.communicate()
    # PyTorch makes a folder for its cache
    assert [p for p in tmp_path.iterdir() if not p.name.startswith("torchinductor_")] == []


def read_pids(process: subprocess.Popen[str], count: int = 2) -> list[int]:
    assert process.stdout is not None
    pids = [int(process.stdout.readline()) for _ in range(count)]
    assert all(map(alive, pids))
    return pids


@pytest.mark.wide
def test_a_script_ends_cleanly_with_idle_workers(start: Start) -> None:
    process = start("print(*run_ranks(pid))")
    out, err = process.communicate(timeout=150)
    assert (process.returncode, err) == (0, "")
    wait_until_gone([int(p) for p in out.split()])


HOLDING_THE_GIL = "run_ranks(reporting(lambda: ctypes.PyDLL(None).sleep(100)))"
STARTING = (
    "from gradwire.testing.ranks import Worker\n"
    "workers = [Worker(), Worker()]\n"
    "[print(w.process.pid, flush=True) for w in workers]\n"
    "time.sleep(100)"
)


@pytest.mark.wide
@pytest.mark.parametrize(
    "script",
    [
        "run_ranks(reporting(lambda: time.sleep(100)))",
        HOLDING_THE_GIL,
        "run_ranks(reporting(lambda: dist.recv(torch.zeros(1), 1 - dist.get_rank())))",
        "run_ranks(reporting(lambda: None)); time.sleep(100)",
        STARTING,
    ],
    ids=["sleeping", "holding the GIL", "in a collective", "between calls", "starting"],
)
def test_sigkill_of_the_parent(start: Start, script: str) -> None:
    process = start(script)
    pids = read_pids(process)
    process.kill()
    wait_until_gone(pids)


def test_ctrl_c(start: Start) -> None:
    process = start("run_ranks(reporting(lambda: time.sleep(100)))")
    pids = read_pids(process)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=150)
    assert err.splitlines()[-1] == "KeyboardInterrupt"
    wait_until_gone(pids)


@pytest.mark.wide
def test_a_fork_neither_uses_nor_ends_its_parent_s_workers(start: Start) -> None:
    process = start(
        "first = run_ranks(pid)\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    assert not set(run_ranks(pid)) & set(first)\n"
        "    sys.exit()\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
        "assert run_ranks(pid) == first\n"
    )
    _, err = process.communicate(timeout=150)
    assert (process.returncode, err) == (0, "")


@pytest.mark.wide
def test_the_pool_can_be_closed_and_starts_again() -> None:
    pids = run_ranks(os.getpid)
    POOL.close()
    assert not any(map(alive, pids))
    POOL.close()
    assert not set(run_ranks(os.getpid)) & set(pids)


@pytest.mark.wide
def test_no_descriptors_or_children_pile_up() -> None:
    def held() -> tuple[int, str]:
        return len(os.listdir("/proc/self/fd")), Path("/proc/thread-self/children").read_text()

    run_ranks(lambda: None)
    before = held()
    for _ in range(3):
        run_ranks(lambda: None)
        assert run_ranks(lambda: os._exit(0), may_die=[0, 1]) == [None, None]
        run_ranks(lambda: None)
    after = held()
    assert after[0] == before[0]
    assert len(after[1].split()) == len(before[1].split())
    inside = [run_ranks(lambda: len(os.listdir("/proc/self/fd"))) for _ in range(4)]
    assert inside[0] == inside[-1]
