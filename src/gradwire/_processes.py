"""Processes of this host: their identity and state, children that end with their parent, deadlines.

Children end with their parent in one of two ways. `end_when_closed` watches a pipe whose writing
end the parent alone holds: it works in every namespace, and whichever thread started the child.
`end_with_parent` has the kernel send SIGKILL, which survives `exec`: for commands of a user.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

ENDED = ("gone", "dead")
"""States of a process that has ended."""

_STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "in uninterruptible I/O",
    "T": "stopped",
    "t": "stopped by a debugger",
    "Z": "dead",
    "X": "dead",
}
SIGNAL_NAMES = {int(each): each.name for each in signal.Signals}
_PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
"""The C library of Linux; None elsewhere."""


# --- identity and state ---


class Stat(NamedTuple):
    """State of a process, and its start time, since process IDs are reused."""

    state: str
    started: int


def stat_of(pid: int) -> Stat | None:
    """Return the state and start time of a process; None if it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None if Path("/proc/self").exists() else Stat("unknown", 0)
    return Stat(_STATES.get(fields[0], fields[0]), int(fields[19]))


def exit_text(code: int) -> str:
    """Return how a process ended: "exited with code 3", "was killed by SIGSEGV"."""
    if code >= 0:
        return f"exited with code {code}"
    return f"was killed by {SIGNAL_NAMES.get(-code, f'signal {-code}')}"


def namespace(kind: str) -> str:
    """Return this process's "pid", "net" or other namespace; "" without Linux's /proc."""
    try:
        return os.readlink(f"/proc/self/ns/{kind}")
    except OSError:
        return ""


def boot_id() -> str | None:
    """Return an identifier of the running kernel; None without Linux's /proc."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None


def this_process() -> str:
    """Return an identifier of this process for `is_alive` in other processes."""
    return json.dumps([_host(), os.getpid(), _started(os.getpid())])


def is_alive(process: str) -> bool:
    """Return True if a process is running, or if it is on another host and cannot be checked."""
    host, pid, started = json.loads(process)
    return host is None or host != _host() or _started(pid) == started


@cache
def _host() -> str | None:
    """Return this host and its process id namespace, or None without Linux's /proc."""
    boot, pids = boot_id(), namespace("pid")
    return f"{boot} {pids}" if boot and pids else None


def _started(pid: int) -> str | None:
    """Return the start time of a process, or None if it has ended or is a zombie."""
    found = stat_of(pid)
    return None if found is None or found.state in ENDED else str(found.started)


def after_fork(function: Callable[[], object]) -> None:
    """Call a function in each forked child from now on, where processes fork."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=function)


after_fork(_host.cache_clear)  # a child may be in another process id namespace


# --- children ---


def end_when_closed(descriptor: int) -> None:
    """End this process when the other end of a pipe is closed, which its parent alone holds."""

    def watch() -> None:
        os.read(descriptor, 1)
        os._exit(1)

    os.set_inheritable(descriptor, False)
    threading.Thread(target=watch, name="gradwire-lifeline", daemon=True).start()
    if LIBC is not None:
        import fcntl  # here: missing on some systems

        # the thread needs the GIL, which extension code may hold for good: have the kernel send
        # SIGKILL when the pipe is closed. The thread is for a pipe that was closed before that
        fcntl.fcntl(descriptor, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(descriptor, fcntl.F_SETFL, os.O_ASYNC)


def end_with_parent() -> None:
    """Have Linux kill this process when the thread that started it ends; `exec` keeps this."""
    # Usable between fork and exec: it imports and allocates nothing.
    if LIBC is not None:
        LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


# --- waiting ---


class Deadline:
    """Point in time, `seconds` from now, by which an operation must end; None for no limit."""

    __slots__ = ("_end", "seconds")

    def __init__(self, seconds: float | None) -> None:
        self.seconds = seconds
        self._end = None if seconds is None else time.monotonic() + seconds

    def over(self) -> bool:
        """Return True if the deadline has passed."""
        return self._end is not None and time.monotonic() >= self._end

    def left(self) -> float | None:
        """Return the seconds until the deadline, at least 0; None for no limit."""
        return None if self._end is None else max(0.0, self._end - time.monotonic())


def wait_until(done: Callable[[], bool], seconds: float, pause: float = 0.02) -> bool:
    """Poll a condition up to a time limit; return its last value."""
    deadline = Deadline(seconds)
    while not (found := done()) and not deadline.over():
        time.sleep(pause)
    return found
