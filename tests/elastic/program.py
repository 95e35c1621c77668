"""A member as a program of its own: `python program.py LOG STEPS PAUSE BACKEND SECONDS`.

The launcher names the store. It appends a line of JSON to LOG for each step that it has committed,
and for its end: a digest of the weights, or the error. SECONDS is the timeout of its collectives;
members are taken for lost after two seconds of silence. It does not begin the last step before a
file LOG.go exists: what a test does before is done while all train. MODE in the environment: "fork"
to fork a process that sleeps, "memory" to ask for more than there is, in a forward.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gradwire import elastic

SAMPLES, BATCH = 64, 16


def main(path: str, steps: int, pause: float, backend: str, seconds: float) -> None:
    """Train."""
    torch.set_num_threads(1)
    with open(path, "a", buffering=1) as log:

        def write(**line: Any) -> None:
            log.write(json.dumps({"pid": os.getpid(), "time": time.monotonic(), **line}) + "\n")

        try:
            write(digest=train(write, path, steps, pause, backend, seconds))
        except Exception as error:
            kinds = [kind.__name__ for kind in type(error).__mro__]
            write(error=kinds, message=str(error))
            raise SystemExit(3) from error


def train(write: Any, path: str, steps: int, pause: float, backend: str, seconds: float) -> str:
    """The digest of the weights after all steps."""
    run = elastic.join(
        backend=backend, timeout=timedelta(seconds=seconds), silence=timedelta(seconds=2)
    )
    write(joined=run.number)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    run.keep(model=net, optimizer=optimizer)
    x = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(1))
    for step in run.steps(steps, samples=SAMPLES, batch=BATCH):
        while step.number == steps - 1 and not Path(f"{path}.go").exists():
            time.sleep(0.01)
        with step:
            if step.number == 5 and os.environ.get("MODE") == "memory":
                limit = 1 << 40
                resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
                torch.empty(limit)
            for shard in step.shards:
                step.backward(net(x[step.sample_ids(shard)]).square().mean())
            time.sleep(pause)
            step.commit(optimizer)
        if step.committed:
            write(step=step.number, size=run.size)
        if step.number == 2 and os.environ.get("MODE") == "fork" and not os.fork():
            write(child=True)
            time.sleep(60.0)
            os._exit(0)
    data = b"".join(p.detach().numpy().tobytes() for p in net.parameters())
    return hashlib.sha256(data).hexdigest()[:16]


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), sys.argv[4], float(sys.argv[5]))
