"""Processes of ranks, as /proc of this host shows them, and requests for their dumps.

Linux only; elsewhere, or without permission, the functions return less.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import signal
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gradwire._processes import ENDED, namespace, stat_of, wait_until
from gradwire.recorder.files import PREFIX

_PROC = Path("/proc")
_CALLS = {
    "x86_64": {0: "read", 1: "write", 20: "write", 61: "wait", 72: "fcntl", 73: "flock"}
    | {247: "wait", 42: "connect", 43: "accept", 288: "accept", 45: "receive", 47: "receive"},
    "aarch64": {63: "read", 64: "write", 66: "write", 260: "wait", 25: "fcntl", 32: "flock"}
    | {95: "wait", 203: "connect", 202: "accept", 242: "accept", 207: "receive", 212: "receive"},
}
_WAITS_FOR_LOCK = (7, 38)  # fcntl's F_SETLKW and F_OFD_SETLKW
_MOST_CHILDREN = 8
_MOST_BYTES = 1 << 16
STACKS_SIGNAL: int | None = signal.SIGRTMAX - 5 if hasattr(signal, "SIGRTMAX") else None
"""Signal on which faulthandler writes a process's stacks, even while C code holds the GIL."""
_LAUNCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


# -- the kernel's view ---------------------------------------------------------------------------


def describe(pid: int) -> dict[str, Any]:
    """Return what a process's main thread is in."""
    task = _PROC / str(pid) / "task" / str(pid)
    found: dict[str, Any] = {"pid": pid}
    with contextlib.suppress(OSError, IndexError):
        # a letter of ps
        found["state"] = (task / "stat").read_text().rpartition(")")[2].split()[0]
    with contextlib.suppress(OSError):
        found["wait channel"] = (task / "wchan").read_text().strip("0\n")
    with contextlib.suppress(OSError):
        command = (_PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ")
        found["command"] = command.decode(errors="replace").strip()[:200]
    with contextlib.suppress(OSError, ValueError, IndexError):
        number, *arguments = (int(field, 0) for field in (task / "syscall").read_text().split()[:7])
        call = _CALLS.get(platform.machine(), {}).get(number, "")
        # further keys: "file", "holder" (PID of the process that holds the file lock that it waits
        # for), "child" (PID it waits for) and "full pipe" (True if it writes to a pipe that is
        # full)
        if call and not (call == "fcntl" and arguments[1] not in _WAITS_FOR_LOCK):
            found["call"] = call
            found |= _details(pid, call, arguments)
    return found


def _details(pid: int, call: str, arguments: list[int]) -> dict[str, Any]:
    if call == "wait":
        child = arguments[0] if arguments[0] < 1 << 31 else 0
        return {"child": arguments[1] if child == 1 and arguments[1] > 1 else child}
    found: dict[str, Any] = {}
    with contextlib.suppress(OSError):
        found["file"] = os.readlink(_PROC / str(pid) / "fd" / str(arguments[0]))
        found["descriptor"] = arguments[0]
    if call == "write":
        found["full pipe"] = str(found.get("file", "")).startswith("pipe:")
    if call in ("flock", "fcntl"):
        found["holder"] = _lock_holder(pid)
    return found


def _lock_holder(pid: int) -> int | None:
    """Return the process that holds the file lock for which a process waits; None if unknown."""
    holder = None
    with contextlib.suppress(OSError):
        for line in (_PROC / "locks").read_text().splitlines():
            fields = line.split()
            if fields[1] != "->":
                holder = int(fields[4])
            elif int(fields[5]) == pid:
                return holder
    return None


def _catches(pid: int, number: int) -> bool:
    """Return True if a process has a handler for a signal, which would otherwise end it."""
    with contextlib.suppress(OSError, ValueError):
        for line in (_PROC / str(pid) / "status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def ask_for_stacks(pid: int, file: Path, seconds: float = 0.1) -> str:
    """Have a process write its stacks to its faulthandler's file; return the new text."""
    # Children that a rank has forked inherit the handler and its file. Nothing is sent to a process
    # without a handler, which the signal would end.
    if STACKS_SIGNAL is None or not _catches(pid, STACKS_SIGNAL):
        return ""
    with contextlib.suppress(OSError):
        before = file.stat().st_size
        os.kill(pid, STACKS_SIGNAL)
        end, size = time.monotonic() + seconds, before
        while time.monotonic() < end:
            time.sleep(0.005)
            now = file.stat().st_size
            if now > before and now == size:
                break
            size = now
        with file.open("rb") as content:
            content.seek(before)
            return content.read(_MOST_BYTES).decode(errors="replace")
    return ""


def family(pid: int, stacks: Path | None) -> dict[str, Any]:
    """Return what a process and its children are in, with the stacks of children in Python."""
    children: list[int] = []
    with contextlib.suppress(OSError):
        for task in (_PROC / str(pid) / "task").iterdir():
            with contextlib.suppress(OSError):
                children += map(int, (task / "children").read_text().split())
    described = []
    for child in children[:_MOST_CHILDREN]:
        described.append(describe(child))
        # faulthandler of this process and of its forks writes to this file
        if stacks is not None:
            described[-1]["stack"] = ask_for_stacks(child, stacks)
    return describe(pid) | {"children": described}


# -- processes of ranks --------------------------------------------------------------------------


@dataclass(frozen=True)
class Process:
    """Process of a rank."""

    rank: int
    pid: int
    # start time, since process IDs are reused
    started: int
    # host and PID namespace in which the ID is valid
    host: str
    namespace: str
    # variables of the launcher: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT
    launch: dict[str, str] = field(default_factory=dict)

    @classmethod
    def this(cls, rank: int) -> Process:
        """Describe the calling process."""
        _, started = stat_of(os.getpid()) or ("", 0)
        launch = {name: os.environ[name] for name in _LAUNCH if name in os.environ}
        return cls(rank, os.getpid(), started, socket.gethostname(), namespace("pid"), launch)

    def file(self, directory: Path) -> Path:
        """Return the file that describes it, also beside another process of the same rank."""
        return directory / f"process-{self.host}-{self.pid}.json"

    @property
    def state(self) -> str:
        """State: "gone", "stopped", …; "unknown" without /proc; "" for another host's process."""
        if (self.host, self.namespace) != (socket.gethostname(), namespace("pid")):
            return ""
        found = stat_of(self.pid)
        return "gone" if found is None or found.started != self.started else found.state


def processes_in(directory: Path) -> list[Process]:
    """Return the processes that have announced their ranks in a directory."""
    found = []
    for path in directory.glob("process-*.json"):
        with contextlib.suppress(OSError, ValueError, TypeError):
            found.append(Process(**json.loads(path.read_text())))
    # one that runs comes after one that it was started in place of
    return sorted(found, key=lambda process: (process.rank, process.state not in ENDED))


# -- requests for dumps --------------------------------------------------------------------------


def modified(path: Path) -> int:
    """Return the time of a file's last change; 0 if it does not exist."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def ask_silent_ranks(directory: Path, asked: int) -> None:
    """Write what ranks of this host are in that run, and have not answered a request."""
    # `asked`: time of the request, in ns of the wall clock
    for process, state in _silent(directory, asked):
        stacks = directory / f"stacks-{process.rank}.txt"
        if modified(stacks) < asked and not state.startswith("stopped"):
            ask_for_stacks(process.pid, stacks)
        answer = directory / f"kernel-{process.rank}.json"
        if modified(answer) < asked:
            answer.write_text(json.dumps(family(process.pid, None) | {"state": state}))


def await_answers(directory: Path, asked: int, seconds: float = 1.0) -> None:
    """Wait a limited time until the running ranks of this host have written their dumps."""
    # A launcher ends the other ranks when the first one ends, so that one stays until they have
    # answered. Ranks that do not are asked by a signal.
    wait_until(lambda: not _silent(directory, asked), seconds)
    ask_silent_ranks(directory, asked)


def _silent(directory: Path, asked: int) -> list[tuple[Process, str]]:
    """Return the processes of this host that run and have not answered, with their states."""
    return [
        (process, state)
        for process in processes_in(directory)
        if (state := process.state)
        and state not in ENDED
        and process.pid != os.getpid()
        and modified(directory / f"{PREFIX}{process.rank}") < asked
    ]
