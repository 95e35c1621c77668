"""Kernel's view of a process: the system call it is in, and whom or what that waits for.

Linux only; elsewhere, or without permission, the functions return less.
"""

from __future__ import annotations

import contextlib
import os
import platform
import signal
import time
from pathlib import Path
from typing import Any

_PROC = Path("/proc")
_CALLS = {
    "x86_64": {0: "read", 1: "write", 20: "write", 61: "wait", 72: "fcntl", 73: "flock"}
    | {247: "wait", 42: "connect", 43: "accept", 288: "accept", 45: "receive", 47: "receive"},
    "aarch64": {63: "read", 64: "write", 66: "write", 260: "wait", 25: "fcntl", 32: "flock"}
    | {95: "wait", 203: "connect", 202: "accept", 242: "accept", 207: "receive", 212: "receive"},
}
_LOCKING = {"flock", "fcntl"}
_SET_AND_WAIT = 7  # F_SETLKW
_OPEN_FILE_SET_AND_WAIT = 38  # F_OFD_SETLKW
_MOST_CHILDREN = 8
_MOST_BYTES = 1 << 16
STACKS_SIGNAL: int | None = signal.SIGRTMAX - 5 if hasattr(signal, "SIGRTMAX") else None
"""Signal on which faulthandler writes a process's stacks, even while C code holds the GIL."""


def describe(pid: int, *, thread: int | None = None) -> dict[str, Any]:
    """Return what a process's main thread, or another thread, is in.

    Returns:
        Keys "state" (a letter of ps), "wait channel", and where known "call", "file", "holder" (PID
        of the process that holds the file lock that it waits for), "child" (PID it waits for) and
        "full pipe" (True if it writes to a pipe that is full).
    """
    task = _PROC / str(pid) / "task" / str(thread or pid)
    found: dict[str, Any] = {"pid": pid}
    with contextlib.suppress(OSError, IndexError):
        found["state"] = (task / "stat").read_text().rpartition(")")[2].split()[0]
    with contextlib.suppress(OSError):
        found["wait channel"] = (task / "wchan").read_text().strip("0\n")
    with contextlib.suppress(OSError):
        command = (_PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ")
        found["command"] = command.decode(errors="replace").strip()[:200]
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = (task / "syscall").read_text().split()
        number, arguments = int(fields[0]), [int(field, 16) for field in fields[1:7]]
        _describe_call(pid, _CALLS.get(platform.machine(), {}).get(number, ""), arguments, found)
    return found


def _describe_call(pid: int, call: str, arguments: list[int], found: dict[str, Any]) -> None:
    if call == "fcntl" and arguments[1] not in (_SET_AND_WAIT, _OPEN_FILE_SET_AND_WAIT):
        return
    if not call:
        return
    found["call"] = call
    if call == "wait":
        child = arguments[0] if arguments[0] < 1 << 31 else 0
        found["child"] = arguments[1] if child == 1 and arguments[1] > 1 else child
        return
    with contextlib.suppress(OSError):
        found["file"] = os.readlink(_PROC / str(pid) / "fd" / str(arguments[0]))
        found["descriptor"] = arguments[0]
    if call == "write":
        found["full pipe"] = str(found.get("file", "")).startswith("pipe:")
    if call in _LOCKING:
        found["holder"] = lock_holder(pid)


def lock_holder(pid: int) -> int | None:
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


def children(pid: int) -> list[int]:
    """Return the child processes of a process."""
    found = []
    with contextlib.suppress(OSError):
        for task in (_PROC / str(pid) / "task").iterdir():
            with contextlib.suppress(OSError):
                found += [int(child) for child in (task / "children").read_text().split()]
    return found


def catches(pid: int, number: int) -> bool:
    """Return True if a process has a handler for a signal, which would otherwise end it."""
    with contextlib.suppress(OSError, ValueError):
        for line in (_PROC / str(pid) / "status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def ask_for_stacks(pid: int, file: Path, seconds: float = 0.1) -> str:
    """Have a process write its stacks to the file that its faulthandler has; return the new text.

    Nothing is sent to a process without a handler for the signal, which would end it. Children that
    a rank has forked inherit the handler and its file.
    """
    number = STACKS_SIGNAL
    if number is None or not catches(pid, number):
        return ""
    with contextlib.suppress(OSError):
        before = file.stat().st_size
        os.kill(pid, number)
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
    """Return what a process and its children are in, with the stacks of children in Python.

    Args:
        pid: Process.
        stacks: File that faulthandler of this process and of its forks writes to.
    """
    found = describe(pid)
    found["children"] = []
    for child in children(pid)[:_MOST_CHILDREN]:
        described = describe(child)
        if stacks is not None:
            described["stack"] = ask_for_stacks(child, stacks)
        found["children"].append(described)
    return found
