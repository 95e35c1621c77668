"""Whether another rank's process on this host still runs: asked when it does not answer."""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path

__all__ = ["is_alive", "this_process"]


def this_process() -> str:
    """This process, as other processes of its host can look it up."""
    return json.dumps([_host(), os.getpid(), _started(os.getpid())])


def is_alive(process: str) -> bool:
    """Whether a process still runs, as far as can be seen from here: on other hosts, all do.

    Example:
        >>> is_alive(this_process())
        True
    """
    host, pid, started = json.loads(process)
    return host is None or host != _host() or _started(pid) == started


@cache
def _host() -> str | None:
    """This host and its process ids' namespace; None where there is no Linux /proc."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return None


def _started(pid: int) -> str | None:
    """When a process began; None if it has ended, or waits only for its parent to take note."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    state, started = fields[0], fields[19]
    return None if state in "ZX" else started


if hasattr(os, "register_at_fork"):  # a child may be in another namespace of process ids
    os.register_at_fork(after_in_child=_host.cache_clear)
