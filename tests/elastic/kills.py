"""Runs in which members are killed, stopped, cut off and joined, against one in which none is.

As a script: `python -m elastic.kills --runs 200 --out FILE`, in the folder of the tests. With
`--links`, started by `unshare --net`, each member has a network of its own, which goes down, too.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import itertools
import json
import multiprocessing
import os
import platform
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from elastic import links, worker
from elastic.worker import BATCH, KINDS, LATE, SAMPLES, Plan
from gradwire.elastic.shards import Samples, Shard

LIMIT_SECONDS = 180.0
OPEN_AT_END = {"shm": 4, "gloo": 5}
"""Descriptors of the run's connection to its store and of a group of one: after any generations."""
CONTEXT = multiprocessing.get_context("forkserver")
PRELOADED = ["torch", "torch._dynamo", "gradwire.elastic", "elastic.worker", "elastic.program"]
CONTEXT.set_forkserver_preload(PRELOADED)  # the first optimizer of a process imports dynamo


class Failed(AssertionError):
    """A run did not end as it must."""


class Members:
    """Processes of one run, by their order of start, and what they send."""

    def __init__(self) -> None:
        self.processes: dict[int, Any] = {}
        self.sent: list[Any] = []
        self._pipes: dict[int, Any] = {}
        self._numbers = itertools.count()

    def fork(self, target: Callable[..., None], *arguments: Any) -> int:
        """Start `target(number, *arguments, pipe)`; return the number of its process."""
        # the process has imported torch: it takes a fifth of a second instead of two
        receiver, sender = CONTEXT.Pipe(duplex=False)
        number = next(self._numbers)
        process = CONTEXT.Process(target=target, args=(number, *arguments, sender), daemon=True)
        process.start()
        sender.close()
        self.processes[number], self._pipes[number] = process, receiver
        return number

    def running(self) -> list[int]:
        return [i for i, process in self.processes.items() if process.exitcode is None]

    def read(self) -> None:
        """Take what they have sent."""
        for pipe in self._pipes.values():
            with contextlib.suppress(EOFError, OSError):  # it may have died while it wrote
                while pipe.poll():
                    self.sent.append(pipe.recv())

    def kill(self, number: int) -> None:
        """Kill one, and forget it."""
        process = self.processes.pop(number)
        process.kill()
        process.join()
        self.read()
        process.close()
        self._pipes.pop(number).close()

    def close(self) -> None:
        """End what is left."""
        for number in [*self._pipes]:
            self.kill(number)


def serve() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


class Struck(Members):
    """Members that a plan's faults strike."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan, self.store = plan, serve()
        self.stopped: dict[int, float] = {}
        self.down: dict[int, float] = {}
        self.without_store: set[int] = set()
        self.struck = dict.fromkeys(["killed", "stopped", "reset", "joined", "down"], 0)
        for _ in range(plan.members):
            self.start()

    def start(self) -> None:
        """Start one more."""
        number = self.fork(worker.main, self.plan, self.store.port)
        if self.plan.apart:
            links.connect_network(self.processes[number].pid)


def run(plan: Plan) -> tuple[list[Any], dict[str, int]]:
    """Return the reports of the members at their ends, and the number of faults.

    Those that were late reported None.

    Raises:
        Failed: A member ended with an error, or the run took too long.
    """
    folder = tempfile.TemporaryDirectory()
    with folder, contextlib.closing(Struck(replace(plan, folder=folder.name))) as members:
        _watch(members, random.Random(plan.seed + 1))
        members.read()
        return members.sent, members.struck


def _watch(members: Struck, chance: random.Random) -> None:
    plan, began = members.plan, time.monotonic()
    faults = sorted(plan.from_outside, key=lambda fault: fault[1])
    first: float | None = None  # faults are counted from the first generation
    seen: set[int] = set()
    while running := members.running():
        now = time.monotonic()
        if now - began > LIMIT_SECONDS:
            raise Failed(f"{plan}: members {running} did not end")
        if first is None and members.store.check(["gradwire/elastic/run/decision/1"]):
            first = now
        while first is not None and faults and now - first > faults[0][1]:
            _strike(members, faults.pop(0)[0], chance, now)
        for index in [i for i, until in members.stopped.items() if now > until]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(members.processes[index].pid, signal.SIGCONT)
            del members.stopped[index]
        for index in [i for i, until in members.down.items() if now > until]:
            links.switch_network(members.processes[index].pid, "up")
            del members.down[index]
        for index in members.processes.keys() - {*members.running()} - seen:
            seen.add(index)
            code = members.processes[index].exitcode
            if code == -signal.SIGKILL:
                members.struck["killed"] += 1
                # a member with the state has to remain
                if plan.restart and len(members.processes) < plan.members + 3:
                    members.start()
            elif code not in (0, LATE) and index not in members.without_store:
                raise Failed(f"{plan}: member {index} ended with {code}")
        wait([members.processes[i].sentinel for i in members.running()], timeout=0.01)


def _strike(members: Struck, fault: str, chance: random.Random, now: float) -> None:
    if fault == "JOIN":
        members.struck["joined"] += 1
        members.start()
        return
    away = {*members.stopped, *members.down, *members.without_store}
    others = [i for i in members.running() if i not in away]
    if len(others) < 2:
        return
    victim = chance.choice(others)
    pid = members.processes[victim].pid
    if fault == "DOWN":
        links.switch_network(pid, "down")
        members.struck["down"] += 1
        members.down[victim] = now + chance.choice([0.2, 1.0, 3.0, 6.0])
        return
    if fault in ("RESET", "STORE"):
        if fault == "STORE":
            members.without_store.add(victim)
        found = links.reset(pid, members.store.port, chance, store=fault == "STORE")
        members.struck["reset"] += bool(found)
        return
    with contextlib.suppress(ProcessLookupError):
        if fault == "KILL":
            os.kill(pid, signal.SIGKILL)
        else:
            os.kill(pid, signal.SIGSTOP)
            members.struck["stopped"] += 1
            members.stopped[victim] = now + chance.choice([0.2, 1.0, 3.0])


def quiet(plan: Plan) -> tuple[str, list[float]]:
    """The weights of one member that is alone, and the ledger that must be."""
    alone = replace(plan, members=1, self_kills={}, from_outside=[], apart=False)
    (report,), _ = run(alone)
    counts = [0.0] * SAMPLES
    samples = Samples(SAMPLES, batch=BATCH, shards=8)
    for step in range(plan.steps):
        for i in samples.ids(step, Shard(0, 8)):
            counts[i] += 1
    if report[1] != counts:
        raise Failed(f"the ledger of one member alone: {report[1]}")
    return report[0], counts


def check(plan: Plan, digest: str, counts: list[float]) -> dict[str, Any]:
    """Run a plan; what came of it.

    Raises:
        Failed: Weights or ledger differ, or something is left behind.
    """
    began, shared = time.monotonic(), set(os.listdir("/dev/shm"))
    found_by_all, struck = run(plan)
    reports = [r for r in found_by_all if r is not None]
    if not plan.reproducible and reports:
        digest = reports[0][0]  # the members agree; other members round otherwise
    for found, ledger, threads, opened, _ in reports:
        if found != digest:
            raise Failed(f"{plan}: weights differ: {found}, not {digest}")
        if ledger != counts:
            raise Failed(f"{plan}: samples counted: {ledger}, not {counts}")
        if threads or len(opened) > OPEN_AT_END[plan.backend]:
            raise Failed(f"{plan}: left open: {threads}, {opened}")
    new = set(os.listdir("/dev/shm")) - shared
    left = {n for n in new if "gradwire" in n and "doctor" not in n}  # that is another program's
    if left:
        raise Failed(f"{plan}: left in /dev/shm: {left}")
    return {
        **asdict(plan),
        "done": len(reports),
        **struck,
        "open": [len(r[3]) for r in reports],
        "seconds": round(time.monotonic() - began, 2),
        "of them after training": round(max((r[4] for r in reports), default=0.0), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--first", type=int, default=0, help="seed of the first run")
    parser.add_argument("--no-tree", action="store_true", help="reproducible=False")
    parser.add_argument("--kind", choices=KINDS, default="", help="by default drawn")
    parser.add_argument("--cuts", action="store_true", help="reset connections, and join")
    parser.add_argument("--links", action="store_true", help="networks of their own go down")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.links:
        links.make_bridge()
    kinds = [options.kind] if options.kind else KINDS
    expected = {kind: quiet(Plan(0, 1, "shm", kind=kind)) for kind in kinds}
    results: list[dict[str, Any]] = []
    failed: list[dict[str, Any]] = []
    for seed in range(options.first, options.first + options.runs):
        plan = Plan.random(
            seed,
            reproducible=not options.no_tree,
            kind=options.kind,
            cuts=options.cuts,
            apart=options.links,
        )
        try:
            results.append(check(plan, *expected[plan.kind]))
            if not results[-1]["done"]:
                print(f"{seed}: nobody was left", flush=True)
        except Failed as error:
            failed.append({"seed": seed, "error": str(error)})
            print(error, flush=True)
        if options.out:
            write(options.out, {"failed": failed, "runs": results})
    print(f"{len(results)} of {options.runs} equal, {len(failed)} failed", flush=True)
    sys.exit(bool(failed))


def write(path: Path, found: dict[str, Any]) -> None:
    """Write the results so far, because a long series may be interrupted."""
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="minutes")
    path.write_text(json.dumps({"date": date, **versions, **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
