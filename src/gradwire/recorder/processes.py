"""State of a rank's process, read from /proc of its host."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, field

from gradwire._processes import ENDED, namespace, stat_of

_LAUNCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
OVER = ENDED


@dataclass(frozen=True)
class Process:
    """Process of a rank.

    Attributes:
        rank: Rank of the process.
        pid, started: Process ID and start time, since IDs are reused.
        host, namespace: Host and PID namespace in which the ID is valid.
        launch: Variables of the launcher: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT.
    """

    rank: int
    pid: int
    started: int
    host: str
    namespace: str
    launch: dict[str, str] = field(default_factory=dict)

    @classmethod
    def this(cls, rank: int) -> Process:
        """Describe the calling process."""
        _, started = stat_of(os.getpid()) or ("", 0)
        launch = {name: os.environ[name] for name in _LAUNCH if name in os.environ}
        return cls(rank, os.getpid(), started, socket.gethostname(), namespace("pid"), launch)


def state_of(process: Process) -> str:
    """Return the state of a process: "gone", "stopped", …; "" if it is not visible from here."""
    if (process.host, process.namespace) != (socket.gethostname(), namespace("pid")):
        return ""
    found = stat_of(process.pid)
    return "gone" if found is None or found.started != process.started else found.state
