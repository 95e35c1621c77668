"""State of a rank's process, read from /proc of its host."""

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
"""States of a process that has ended."""


@dataclass(frozen=True)
class Process:
    """Process of a rank.

    Attributes:
        rank: Rank of the process.
        pid, started: Process ID and start time, since IDs are reused.
        host, namespace: Host and PID namespace in which the ID is valid.
    """

    rank: int
    pid: int
    started: int
    host: str
    namespace: str

    @classmethod
    def this(cls, rank: int) -> Process:
        """Describe the calling process."""
        _, started = _stat(os.getpid()) or ("", 0)
        return cls(rank, os.getpid(), started, socket.gethostname(), _namespace())


def state_of(process: Process) -> str:
    """Return the state of a process: "gone", "stopped", …; "" if it is not visible from here."""
    if (process.host, process.namespace) != (socket.gethostname(), _namespace()):
        return ""
    found = _stat(process.pid)
    if found is None or found[1] != process.started:
        return "gone"
    return _STATES.get(found[0], found[0])


def state_of_pid(pid: int) -> str:
    """Return the state of a process of this host, as in `state_of`."""
    found = _stat(pid)
    return "gone" if found is None else _STATES.get(found[0], found[0])


def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _stat(pid: int) -> tuple[str, int] | None:
    """Return the state and start time of a process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return fields[0], int(fields[19])
