"""Whether a rank's process is there, as /proc of its host has it."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

_STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "in uninterruptible I/O",
    "T": "stopped",
    "t": "stopped by a debugger",
    "Z": "dead",
    "X": "dead",
}
OVER = ("gone", "dead")
"""States of a process that runs no more."""


@dataclass(frozen=True)
class Process:
    """A rank's process.

    Attributes:
        rank: The rank.
        pid, started: Its number, and when the kernel started it: a number may be used again.
        host, namespace: Where these numbers mean something.
    """

    rank: int
    pid: int
    started: int
    host: str
    namespace: str

    @classmethod
    def this(cls, rank: int) -> Process:
        """The process that calls."""
        _, started = _stat(os.getpid()) or ("", 0)
        return cls(rank, os.getpid(), started, socket.gethostname(), _namespace())


def state_of(process: Process) -> str:
    """What a process does: "gone", "stopped", …; "" if it cannot be seen from here."""
    if (process.host, process.namespace) != (socket.gethostname(), _namespace()):
        return ""
    found = _stat(process.pid)
    if found is None or found[1] != process.started:
        return "gone"
    return _STATES.get(found[0], found[0])


def state_of_pid(pid: int) -> str:
    """What a process of this host does, as in `state_of`."""
    found = _stat(pid)
    return "gone" if found is None else _STATES.get(found[0], found[0])


def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _stat(pid: int) -> tuple[str, int] | None:
    """A process's state, and when it was started."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return fields[0], int(fields[19])
