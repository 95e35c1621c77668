"""`gradwire demo --kill`: members of an elastic run are killed while they train.

They write lines to a file; a thread follows it, shows what happens, and kills one of those that
train now and then. At the end the same training runs in this process, alone, and the parameters
are compared bit for bit.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from rich.console import Console

from gradwire.cli.demo.data import TRAIN_IMAGES
from gradwire.cli.demo.kill_member import KillOptions, train
from gradwire.elastic import supervise

__all__ = ["run_kill"]

PAUSE_SECONDS = 0.03
BETWEEN_KILLS = (0.8, 2.0)  # seconds
POLL_SECONDS = 0.02
KILLS = 6


@dataclass
class _Follower:
    """Follows the members' file, and kills.

    Attributes:
        digests: What members that were done reported, by process.
        kills: How many processes were killed.
        waits: Seconds from each kill to the next committed step.
    """

    console: Console
    options: KillOptions
    chance: random.Random
    ended: threading.Event = field(default_factory=threading.Event)
    digests: dict[int, str] = field(default_factory=dict)
    kills: int = 0
    waits: list[float] = field(default_factory=list)
    _members: dict[int, dict[int, int]] = field(default_factory=dict)  # by epoch: pid, last step
    _epoch: int = 0
    _step: int = -1
    _killed_at: float | None = None
    _next: float = 0.0

    def run(self) -> None:
        """Until `ended`."""
        with Path(self.options.log).open() as file:
            while True:
                over = self.ended.is_set()
                for line in file:
                    self._receive(json.loads(line))
                if over:
                    return
                self._maybe_kill()
                time.sleep(POLL_SECONDS)

    def started(self, pid: int) -> None:
        """A process was started."""
        if self.kills:
            self.console.print(f"[dim]            process {pid} is started in its place[/]")

    def _receive(self, message: dict[str, Any]) -> None:
        if "digest" in message:
            self.digests[message["pid"]] = message["digest"]
            return
        epoch, step = message["epoch"], message["step"]
        self._members.setdefault(epoch, {})[message["pid"]] = step
        if epoch > self._epoch:
            self._epoch = epoch
            self._next = time.monotonic() + self.chance.uniform(*BETWEEN_KILLS)
            members = "process" if message["size"] == 1 else "processes"
            self.console.print(
                f"  step {step:>4}   [bold]epoch {epoch}[/]: {message['size']} {members}"
            )
            if self._killed_at is not None:
                self.waits.append(time.monotonic() - self._killed_at)
                self._killed_at = None
        self._step = max(self._step, step)

    def _maybe_kill(self) -> None:
        members = self._members.get(self._epoch, {})
        if len(members) < 2 or time.monotonic() < self._next or self._killed_at is not None:
            return
        if self.kills == KILLS or self._step > self.options.steps * 0.9:
            return
        victim = self.chance.choice(sorted(members))
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)
            self.kills += 1
            self._killed_at = time.monotonic()
            self.console.print(f"  step {self._step:>4}   [red]SIGKILL[/] to process {victim}")


def run_kill(*, nproc: int, epochs: int, batch_size: int, seed: int, backend: str) -> int:
    """Run and show it; the exit code: 1 if the parameters differ."""
    console = Console(highlight=False)
    steps = epochs * (TRAIN_IMAGES // batch_size)
    with tempfile.TemporaryDirectory(prefix="gradwire-demo-") as folder:
        log = Path(folder) / "log"
        log.touch()
        options = KillOptions(str(log), steps, batch_size, seed, backend, PAUSE_SECONDS)
        console.print(
            f"[bold]gradwire demo --kill[/]: {nproc} processes train for {steps} steps on "
            f"{TRAIN_IMAGES} handwritten digits;\n[dim]one that is killed is started again[/]\n"
        )
        follower = _Follower(console, options, random.Random())
        thread = threading.Thread(target=follower.run, name="gradwire-demo-kill")
        thread.start()
        module = "gradwire.cli.demo.kill_member"
        command = [sys.executable, "-m", module, json.dumps(asdict(options))]
        try:
            code = supervise(command, nproc=nproc, max_restarts=100, on_start=follower.started)
        finally:
            follower.ended.set()
            thread.join()
    if code or not follower.digests:
        console.print(f"[red]no process came to the end (exit code {code})[/]")
        return 1
    return _compare(console, follower, replace(options, log="", pause=0.0))


def _compare(console: Console, follower: _Follower, options: KillOptions) -> int:
    """The same training, in this process alone."""
    console.print("\n[dim]the same training in one process that nobody kills ...[/]")
    quiet = train(options, dist.HashStore())
    found = set(follower.digests.values())
    if follower.waits:
        worst = max(follower.waits)
        console.print(
            f"{follower.kills} processes killed; at most {worst:.2f} s to the next committed step"
        )
    console.print(f"  parameters with kills     sha256 {' '.join(sorted(d[:16] for d in found))}")
    console.print(f"  parameters without kills  sha256 {quiet[:16]}")
    if found == {quiet}:
        console.print("[green]equal, bit for bit[/]")
        return 0
    console.print("[red]they differ[/]")
    return 1
