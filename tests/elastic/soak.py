"""A long run in which members are killed all the time: what its processes hold, over the time.

`python -m elastic.soak --minutes 30 --out FILE` in the tests' folder. Two members are never killed,
one is killed again and again, and a new one takes its place each time; all share one host with the
store, which the script serves. Every few seconds the memory, threads and descriptors of each
process are written down. At the end, the weights after every 200 steps are held against those of
one member that is alone.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import gc
import json
import os
import platform
import random
import sys
import time
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple

import torch

from elastic.kills import Members, serve
from elastic.worker import EVERY, KINDS, STOP, member_of_soak

MEMBERS = 3


class Held(NamedTuple):
    """Resources of a process.

    Args:
        seconds: Since the run's start.
        name: Of the process: "store", or a member's number by start order.
        memory: Resident memory of its own (without shared pages), in KiB.
        threads, descriptors: How many.
    """

    seconds: float
    name: str
    memory: int
    threads: int
    descriptors: int


class Soak(Members):
    """The processes of the run.

    Args:
        options: Number of members at a time, backend, seconds of each step, and kind of the model
            and its optimizer.
    """

    def __init__(self, *options: Any) -> None:
        super().__init__()
        self._options, self.store, self.kills = options, serve(), 0
        for _ in range(options[0]):
            self.fork(member_of_soak, self.store.port, *options)

    def replace(self) -> None:
        """Kill the youngest, and start another."""
        self.kill(max(self.processes))
        self.kills += 1
        self.fork(member_of_soak, self.store.port, *self._options)

    def check(self) -> None:
        """Raise if a member has ended by itself."""
        codes = {number: process.exitcode for number, process in self.processes.items()}
        assert not any(codes.values()), f"members ended with {codes}"
        self.read()

    def wait(self, seconds: float) -> None:
        """Wait until all members have stopped."""
        until = time.monotonic() + seconds
        while running := self.running():
            assert time.monotonic() < until, "members did not stop"
            wait([self.processes[number].sentinel for number in running], timeout=1.0)
            self.check()

    def held(self, seconds: float) -> list[Held]:
        """Return the current resources of each process."""
        pids = {"store": os.getpid(), **{str(n): p.pid for n, p in self.processes.items()}}
        return [Held(round(seconds, 1), name, *_held(pid)) for name, pid in pids.items()]


def _held(pid: int) -> tuple[int, int, int]:
    folder = Path(f"/proc/{pid}")
    fields = {}
    for line in (folder / "smaps_rollup").read_text().splitlines()[1:]:
        name, _, value = line.partition(":")
        fields[name] = int(value.split()[0])
    own = fields["Private_Clean"] + fields["Private_Dirty"]
    return own, len(os.listdir(folder / "task")), len(os.listdir(folder / "fd"))


def soak(
    minutes: float,
    backend: str,
    *,
    members: int,
    pause: float,
    kind: str,
    kill_every: float,
    look_every: float,
) -> dict[str, Any]:
    """Run; what the processes held, and what the weights were."""
    shared = set(os.listdir("/dev/shm"))
    run, chance = Soak(members, backend, pause, kind), random.Random(0)
    found: list[Held] = []
    began = time.monotonic()
    try:
        kill_at, look_at = began + 10, began + 5
        while (now := time.monotonic()) < began + 60 * minutes:
            run.check()
            if now > kill_at:
                run.replace()
                kill_at = now + kill_every * (0.5 + chance.random())
            if now > look_at:
                gc.collect()
                found += run.held(now - began)
                look_at = now + look_every
            time.sleep(0.05)
        last = max(found.steps for found in run.sent)
        run.store.set(STOP, str(last + 3 * EVERY))  # all stop at the same step
        run.wait(300)
    finally:
        run.close()
    assert run.sent, "nobody came to the first comparison"
    steps = max(digest.steps for digest in run.sent)
    expected = alone(steps, kind)
    wrong = [tuple(d) for d in run.sent if expected[d.steps] != d.digest]
    left = sorted(n for n in set(os.listdir("/dev/shm")) - shared if "gradwire" in n)
    return {
        "backend": backend,
        "kind": kind,
        "minutes": minutes,
        "members": members,
        "kills": run.kills,
        "steps": steps,
        "keys in the store": run.store.num_keys(),
        "comparisons": len(run.sent),
        "weights that differ": wrong,
        "left in /dev/shm": left,
        "held": found,
    }


def alone(steps: int, kind: str) -> dict[int, str]:
    """The weights that one member alone has after every so many steps."""
    with contextlib.closing(Soak(1, "shm", 0.0, kind)) as run:
        run.store.set(STOP, str(steps))
        run.wait(3600)
        return {found.steps: found.digest for found in run.sent}


def trend(result: dict[str, Any]) -> dict[str, dict[str, list[float]]]:
    """Of each process that lived to the end: the means over the second and the last tenth."""
    found: dict[str, dict[str, list[float]]] = {}
    for name in ["store", *(str(n) for n in range(result["members"] - 1))]:
        rows = [held for held in map(Held._make, result["held"]) if held.name == name]
        tenth = max(1, len(rows) // 10)
        parts = rows[tenth : 2 * tenth] or rows, rows[-tenth:]
        found[name] = {
            what: [round(sum(getattr(h, what) for h in part) / len(part), 1) for part in parts]
            for what in ("memory", "threads", "descriptors")
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--backend", choices=["shm", "gloo"], default="shm")
    parser.add_argument("--kind", choices=KINDS, default="plain", help="model and optimizer")
    parser.add_argument("--pause", type=float, default=0.01, help="seconds of each step")
    parser.add_argument("--kill-every", type=float, default=4.0, help="seconds, on average")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    result = soak(
        options.minutes,
        options.backend,
        members=MEMBERS,
        pause=options.pause,
        kind=options.kind,
        kill_every=options.kill_every,
        look_every=5.0,
    )
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="minutes")
    result = {
        "date": date,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "trend": trend(result),
        **result,
    }
    print(json.dumps({k: v for k, v in result.items() if k != "held"}, indent=1), flush=True)
    if options.out:
        options.out.write_text(json.dumps(result) + "\n")
    sys.exit(bool(result["weights that differ"] or result["left in /dev/shm"]))


if __name__ == "__main__":
    main()
