"""Start of a checked program on the ranks of this host, each by `gradwire.check.__main__`."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from gradwire.check.observer import LIMIT_PREFIX
from gradwire.check.run import Run

_POLL_SECONDS = 0.1
_END_SECONDS = 10.0
"""Time for the other ranks to end after one has failed."""
_START_SECONDS = 120.0
"""Time for the ranks to import PyTorch, in addition to the timeout."""
_STDERR = 2


@dataclass(frozen=True)
class Outcome:
    """End of a checked program.

    Attributes:
        run: Records of all ranks.
        failed: Rank and exit code of the ranks that failed by themselves.
        stalled: True if the ranks were ended because nothing happened for too long.
    """

    run: Run
    failed: dict[int, int]
    stalled: bool


def run_checked(program: Sequence[str], ranks: int, steps: int, timeout: float) -> Outcome:
    """Run a program on the ranks of this host, and return what they recorded.

    Args:
        program: Python file with its arguments, or "-m", a module and its arguments.
        ranks: Number of processes.
        steps: Number of optimizer steps of each rank after which the ranks are ended; 0 for none.
        timeout: Seconds without an event of any rank after which the ranks are ended.
    """
    with tempfile.TemporaryDirectory(prefix="gradwire-check-") as name:
        folder = Path(name)
        command = [sys.executable, "-m", __package__, name, str(steps), *program]
        with _started(command, ranks) as processes:
            stalled = _wait(processes, folder, timeout)
            codes = [process.poll() for process in processes]
        failed = {rank: code for rank, code in enumerate(codes) if code}
        return Outcome(Run.read(folder), failed, stalled)


@contextmanager
def _started(command: Sequence[str], ranks: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start the ranks with torchrun's environment variables; none is left at the end."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "gradwire-check",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "GRADWIRE_LAUNCHER": str(os.getpid()),
    }
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(ranks):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "ROLE_RANK": str(rank)}
            environment = os.environ | common | own
            processes.append(subprocess.Popen(command, env=environment, stdout=_STDERR))
        yield processes
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            try:
                process.wait(_END_SECONDS / 2)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait(processes: list[subprocess.Popen[bytes]], folder: Path, timeout: float) -> bool:
    """Wait for the last observed step or the end; return True if nothing happened for too long."""
    failed_at = None
    while True:
        codes = [process.poll() for process in processes]
        limits = [(folder / f"{LIMIT_PREFIX}{rank}").exists() for rank in range(len(codes))]
        over = all(code == 0 or limit for code, limit in zip(codes, limits, strict=True))
        if None not in codes or over:
            return False
        if any(codes):
            failed_at = failed_at or time.monotonic()
            if time.monotonic() > failed_at + _END_SECONDS:
                return False
        files = list(folder.iterdir())
        latest = max(path.stat().st_mtime for path in [folder, *files])
        if time.time() > latest + timeout + _START_SECONDS * (len(files) < len(codes)):
            return True
        time.sleep(_POLL_SECONDS)
