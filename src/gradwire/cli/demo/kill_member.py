"""One process of `gradwire demo --kill`: trains on the digits, and writes what it does to a file.

Started as `python -m gradwire.cli.demo.kill_member OPTIONS`, with KillOptions as JSON.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed import Store

from gradwire import elastic
from gradwire.cli.demo.data import TRAIN_IMAGES, load_digits
from gradwire.cli.demo.model import build_model, build_optimizer
from gradwire.errors import RunOverError

__all__ = ["KillOptions", "train"]

CPU = torch.device("cpu")


@dataclass(frozen=True)
class KillOptions:
    """The demo's settings, for its members.

    Args:
        log: The file that members write to.
        steps: How many there are.
        batch_size: Images per step.
        seed: Of the initial parameters and of the order of the images.
        backend: "shm" or "gloo".
        pause: Seconds that a step takes at least, so that a reader can follow.
    """

    log: str
    steps: int
    batch_size: int
    seed: int
    backend: str
    pause: float


def train(options: KillOptions, store: Store | None = None) -> str:
    """Train as a member of a run; the digest of the parameters, to the last bit."""
    torch.set_num_threads(1)
    digits = load_digits(options.seed, CPU)
    model = build_model(options.seed, CPU)
    optimizer = build_optimizer(model, options.batch_size)
    run = elastic.join(
        store,
        shards=4,
        seed=options.seed,
        backend=options.backend,
        silence=timedelta(seconds=10),
    )
    run.keep(model=model, optimizer=optimizer)
    for step in run.steps(options.steps, samples=TRAIN_IMAGES, batch=options.batch_size):
        began, loss = time.monotonic(), torch.zeros((), dtype=torch.float32)
        with step:
            for shard in step.shards:
                ids = step.sample_ids(shard)
                output = model(digits.train_images[ids])
                loss = nn.functional.cross_entropy(output, digits.train_labels[ids])
                step.backward(loss)
            time.sleep(max(0.0, began + options.pause - time.monotonic()))
            step.commit(optimizer)
        _write(options, step=step.number, epoch=run.epoch, pid=os.getpid(), size=run.size)
    data = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    return hashlib.sha256(data).hexdigest()


def _write(options: KillOptions, **message: Any) -> None:
    if options.log:
        with Path(options.log).open("a") as file:  # one short write: lines stay whole
            file.write(json.dumps(message) + "\n")


def main() -> None:
    """Train with the options of the command line."""
    options = KillOptions(**json.loads(sys.argv[1]))
    with contextlib.suppress(RunOverError):  # it was started again when the others were done
        _write(options, digest=train(options), pid=os.getpid())


if __name__ == "__main__":
    main()
