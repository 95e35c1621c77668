"""Time from SIGKILL of one of two processes to the next committed step, beside two peers.

torchrun starts all workers again from a checkpoint of the last step; torchft's replicas depend on a
Lighthouse, and drop the step that fails. torchft is measured where it is installed, with its own
heartbeat timeout of 5 s, and with one of 1 s.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.elastic.models import MEMBERS

__all__ = ["KINDS", "measure", "missing"]

LIGHTHOUSES = {"torchft": 5000, "torchft, 1 s": 1000}
"""After how many ms without a heartbeat a Lighthouse takes a replica for lost."""
KINDS = ("shm", "gloo", "torchrun", *LIGHTHOUSES)


class NotGoingOn(Exception):
    """Nothing was committed for two minutes after the kill."""


def missing(kind: str) -> str:
    """Why a contender cannot be measured here; "" if it can."""
    if kind in LIGHTHOUSES and importlib.util.find_spec("torchft") is None:
        return "torchft is not installed: pip install torchft-nightly"
    return ""


def recovery(kind: str) -> float:
    """Seconds from SIGKILL of one of two processes to the next step that is committed."""
    with tempfile.TemporaryDirectory() as folder, _lighthouse(kind) as environment:
        log = Path(folder) / "log"
        log.touch()
        launched = subprocess.Popen(
            _command(kind, log),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, **environment},
        )
        try:
            return _kill_and_wait(log)
        finally:
            launched.send_signal(signal.SIGTERM)
            late = threading.Timer(15, launched.kill)
            late.start()
            launched.wait()
            late.cancel()


def _command(kind: str, log: Path) -> list[str]:
    trainer = "torchft" if kind in LIGHTHOUSES else kind
    own = ["-m", "benchmarks.elastic", "_trainer", trainer, str(log)]
    if kind == "torchrun":
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
        return [sys.executable, *launcher, str(MEMBERS), "--max-restarts", "3", *own]
    # gradwire's supervisor starts torchft's replicas again, too: its own does so by Slurm
    supervisor = ["-m", "gradwire.elastic", "--nproc-per-node", str(MEMBERS)]
    return [sys.executable, *supervisor, *own]


@contextlib.contextmanager
def _lighthouse(kind: str) -> Iterator[dict[str, str]]:
    """Serve a Lighthouse and yield the environment by which a replica finds it."""
    if kind not in LIGHTHOUSES:
        yield {}
        return
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(bind="[::]:0", min_replicas=1, heartbeat_timeout_ms=LIGHTHOUSES[kind])
    try:
        yield {"TORCHFT_LIGHTHOUSE": server.address()}
    finally:
        server.shutdown()


def _kill_and_wait(log: Path) -> float:
    pids = _until(lambda: _pids_after(log, 20), TimeoutError)
    time.sleep(random.random() * 0.2)
    victim = random.choice(pids)
    last = max(int(line.split()[2]) for line in _lines(log))
    os.kill(victim, signal.SIGKILL)
    killed = time.monotonic()

    def next_commit() -> list[float]:
        parsed = (line.split() for line in _lines(log))
        times = [(float(t), int(pid), int(n)) for t, pid, n in parsed]
        return [t for t, pid, n in times if t > killed and pid != victim and n > last]

    # the step whose sum was complete may come at once: what counts is when it goes on after it
    later = _until(lambda: found if len(found := next_commit()) >= 2 else [], NotGoingOn)
    second: float = sorted(later)[1]
    return second - killed


def _pids_after(log: Path, number: int) -> list[int]:
    found = {int(line.split()[1]) for line in _lines(log) if int(line.split()[2]) >= number}
    return sorted(found) if len(found) == MEMBERS else []


def _lines(log: Path) -> list[str]:
    text = log.read_text()
    return text[: text.rfind("\n") + 1].splitlines()


def _until(found: Callable[[], list[Any]], error: type[Exception]) -> list[Any]:
    deadline = time.monotonic() + 120
    while not (result := found()):
        if time.monotonic() > deadline:
            raise error("nothing was committed for two minutes")
        time.sleep(0.002)
    return result


def measure(
    kinds: tuple[str, ...], times: int, earlier: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Each contender in turn, several times; a time of None where it did not go on.

    Args:
        kinds: The contenders.
        times: Number of measurements of each.
        earlier: Result of an earlier call, whose times are included.
    """
    seconds: dict[str, list[float | None]] = {
        kind: [*(earlier or {}).get(kind, {}).get("all", [])] for kind in kinds
    }
    for _ in range(times):
        for kind in kinds:
            try:
                taken: float | None = round(recovery(kind), 4)
            except NotGoingOn:
                taken = None
            seconds[kind].append(taken)
            print(kind, taken, flush=True)
    return {kind: _summary(found) for kind, found in seconds.items()}


def _summary(found: list[float | None]) -> dict[str, Any]:
    known = [s for s in found if s is not None]
    middle, worst = (statistics.median(known), max(known)) if known else (None, None)
    return {"median": middle, "worst": worst, "all": found}
