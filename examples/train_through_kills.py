"""An elastic run whose processes are killed: the parameters at the end are equal bit for bit.

python examples/train_through_kills.py

Three processes train on handwritten digits. This process kills one of them every second or two,
and `supervise` starts a new one. At the end, the same training runs in this process alone, and the
parameters are compared. Requires `pip install "gradwire[demo]"`.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed import Store

from gradwire import elastic
from gradwire.errors import RunOverError

STEP_SECONDS = 0.03  # a step takes at least as long, so that a reader can follow
SECONDS_BETWEEN_KILLS = (0.8, 2.0)
KILLS = 6


def train(steps: int, log: Path | None = None, store: Store | None = None) -> str:
    """Train as a member of an elastic run, and return a digest of the parameters."""
    torch.set_num_threads(1)
    digits = load_digits()
    images = torch.as_tensor(digits.data, dtype=torch.float32) / 8 - 1
    labels = torch.as_tensor(digits.target, dtype=torch.int64)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    run = elastic.join(store, shards=4, silence=timedelta(seconds=10))
    run.keep(model=model, optimizer=optimizer)
    for step in run.steps(steps, samples=len(images), batch=64):
        began = time.monotonic()
        with step:
            for shard in step.shards:
                ids = step.sample_ids(shard)
                step.backward(nn.functional.cross_entropy(model(images[ids]), labels[ids]))
            if log is not None:
                time.sleep(max(0.0, began + STEP_SECONDS - time.monotonic()))
            step.commit(optimizer)
        write(log, step=step.number, generation=run.generation, size=run.size)
    data = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    return hashlib.sha256(data).hexdigest()


def write(log: Path | None, **message: Any) -> None:
    """Append a message of this process to the log that the killer reads."""
    if log is not None:
        with log.open("a") as file:  # one short write: lines stay whole
            file.write(json.dumps(message | {"pid": os.getpid()}) + "\n")


class Killer:
    """Thread that reads the members' log, prints their progress and kills some of them.

    Attributes:
        digests: Digests of members that reached the end.
        kills: Number of processes killed.
    """

    def __init__(self, log: Path, steps: int) -> None:
        self.digests: set[str] = set()
        self.kills = 0
        self._log, self._steps = log, steps
        self._ended = threading.Event()
        self._generation, self._step = 0, -1
        self._members: set[int] = set()
        self._next = time.monotonic()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Killer:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        with self._log.open() as file:
            while True:
                ended = self._ended.is_set()  # before reading: no line is missed
                for line in file:
                    self._receive(json.loads(line))
                if ended:
                    return
                self._maybe_kill()
                time.sleep(0.02)

    def _receive(self, message: dict[str, Any]) -> None:
        if "digest" in message:
            self.digests.add(message["digest"])
            return
        if message["generation"] > self._generation:
            self._generation, self._members = message["generation"], set()
            self._next = time.monotonic() + random.uniform(*SECONDS_BETWEEN_KILLS)
            print(f"step {message['step']:>4}  {message['size']} processes", flush=True)
        if message["generation"] == self._generation:
            self._members.add(message["pid"])
        self._step = max(self._step, message["step"])

    def _maybe_kill(self) -> None:
        if len(self._members) < 2 or time.monotonic() < self._next:
            return
        if self.kills == KILLS or self._step > self._steps * 0.9:
            return
        victim = random.choice(sorted(self._members))
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)
            self.kills += 1
            print(f"step {self._step:>4}  SIGKILL to process {victim}", flush=True)
        self._members = set()  # until the next generation


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nproc", type=int, default=3)
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--member", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.member:
        with contextlib.suppress(RunOverError):  # started again after the others were done
            write(options.member, digest=train(options.steps, options.member))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        log.touch()
        command = [sys.executable, __file__, "--steps", str(options.steps), "--member", str(log)]
        with Killer(log, options.steps) as killer:
            code = elastic.supervise(command, nproc=options.nproc, max_restarts=100)
    if code:
        return code
    alone = train(options.steps, store=dist.HashStore())
    print(f"{killer.kills} processes killed")
    print("with kills     sha256", *(digest[:16] for digest in sorted(killer.digests)))
    print("without kills  sha256", alone[:16])
    equal = killer.digests == {alone}
    print("equal, bit for bit" if equal else "the parameters differ")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
