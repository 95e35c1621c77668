"""Requests for dumps: a file that all ranks poll, and a signal for ranks that do not answer."""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path

from gradwire.recorder.kernel import ask_for_stacks, family
from gradwire.recorder.processes import OVER, Process, state_of

REQUEST = "request"


def modified(path: Path) -> int:
    """Return the time of a file's last change; 0 if it does not exist."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def processes_in(directory: Path) -> list[Process]:
    """Return the processes that have announced their ranks in a directory."""
    found = []
    for path in directory.glob("process-*.json"):
        with contextlib.suppress(OSError, ValueError, TypeError):
            found.append(Process(**json.loads(path.read_text())))
    return sorted(found, key=lambda process: process.rank)


def ask_silent_ranks(directory: Path, asked: int, prefix: str) -> None:
    """Write what ranks of this host are in that run, and have not answered a request.

    Their stacks go to `stacks-<rank>.txt`, and the kernel's view to `kernel-<rank>.json`.

    Args:
        directory: Directory of the dumps.
        asked: Time of the request, in ns of the wall clock.
        prefix: Prefix of dumps' names.
    """
    for process, state in _silent(directory, asked, prefix):
        rank = process.rank
        stacks = directory / f"stacks-{rank}.txt"
        if modified(stacks) < asked and not state.startswith("stopped"):
            ask_for_stacks(process.pid, stacks)
        answer = directory / f"kernel-{rank}.json"
        if modified(answer) < asked:
            answer.write_text(json.dumps(family(process.pid, None) | {"state": state}))


def await_answers(directory: Path, asked: int, prefix: str, seconds: float = 1.0) -> None:
    """Wait a limited time until the running ranks of this host have written their dumps.

    A launcher ends the other ranks when the first one ends, so that one stays until they have
    answered. Ranks that do not are asked by a signal.
    """
    end = time.monotonic() + seconds
    while time.monotonic() < end and _silent(directory, asked, prefix):
        time.sleep(0.02)
    ask_silent_ranks(directory, asked, prefix)


def _silent(directory: Path, asked: int, prefix: str) -> list[tuple[Process, str]]:
    """Return the processes of this host that run and have not answered, with their states."""
    states = [(process, state_of(process)) for process in processes_in(directory)]
    return [
        (process, state)
        for process, state in states
        if state
        and state not in OVER
        and process.pid != os.getpid()
        and modified(directory / f"{prefix}{process.rank}") < asked
    ]
