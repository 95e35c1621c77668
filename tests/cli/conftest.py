"""Commands in their own sessions, so that leftover processes can be found."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from gradwire._processes import wait_until

LIMIT = 100.0
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Command:
    """Python command in its own session, read line by line."""

    def __init__(self, arguments: list[str], environment: Mapping[str, str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, *arguments],
            env=environment,
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def read_until(self, text: str) -> None:
        """Read output up to a line with `text`."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if text in line:
                return
        pytest.fail(f"no {text!r}; stderr: {self.process.communicate()[1]}")

    def end(self) -> tuple[int, str, str]:
        """Wait for the end; return the exit code and the rest of stdout and stderr."""
        out, err = self.process.communicate(timeout=LIMIT)
        return self.process.returncode, out, err

    def alive(self) -> dict[int, str]:
        """Return the command lines of the session's living processes, by process ID."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                status = (folder / "stat").read_text().rpartition(")")[2].split()
                line = (folder / "cmdline").read_text().replace("\0", " ")
            except (FileNotFoundError, ProcessLookupError):
                continue  # ended meanwhile
            state, session = status[0], int(status[3])
            if session == self.process.pid and state != "Z":
                found[int(folder.name)] = line
        return found

    def ranks(self) -> list[int]:
        """Return the process IDs of the ranks, in the order of their start."""
        return sorted(pid for pid, line in self.alive().items() if "testing.ranks" in line)

    def survivors(self) -> dict[int, str]:
        """Return processes of the session that remain after some time."""
        wait_until(lambda: not self.alive(), LIMIT)
        return self.alive()


@pytest.fixture
def command() -> Iterator[Callable[..., Command]]:
    """Start `python ARGUMENTS...`; kill its session at the end of the test."""
    started = []

    def start(*arguments: str) -> Command:
        # at each start: other fixtures set variables, too
        environment = {name: value for name, value in os.environ.items() if name not in LAUNCHER}
        started.append(Command(list(arguments), environment))
        return started[-1]

    yield start
    for one in started:
        for pid in one.alive():
            os.kill(pid, signal.SIGKILL)
        one.process.communicate()
