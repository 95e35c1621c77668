"""Elastic training: what a step costs without failures, and how long a killed member costs.

`python -m benchmarks.elastic steps|recovery --out FILE`. Recovery is measured beside torchrun,
which starts all workers again from a checkpoint of the last step, on the same model: 6 linear
layers of 512 × 512, 64 samples a step, two processes of one thread each.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradwire import DistributedDataParallel, elastic

MEMBERS, BATCH, WIDTH, LAYERS = 2, 64, 512, 6
BLOCK = 5  # steps of one contender before the next has its turn


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[m for _ in range(LAYERS) for m in (nn.Linear(WIDTH, WIDTH), nn.ReLU())])


def data() -> Tensor:
    return torch.randn(1024, WIDTH, generator=torch.Generator().manual_seed(0))


# -- steps without failures ----------------------------------------------------------------


def plain(group: dist.ProcessGroup) -> Iterator[None]:
    """DistributedDataParallel, each of whose ranks has its half of the batch."""
    x, net = data(), DistributedDataParallel(model(), process_group=group)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    samples = elastic.Samples(len(x), batch=BATCH, shards=MEMBERS)
    for step in range(1 << 30):
        ids = samples.ids(step, elastic.Shard(group.rank(), group.rank() + 1))
        optimizer.zero_grad()
        net(x[ids]).square().mean().backward()
        optimizer.step()
        yield


def elastic_steps(
    store: dist.Store, backend: str, name: str, *, reproducible: bool, shards: int
) -> Iterator[None]:
    """The same as a member of an elastic run."""
    run = elastic.join(
        store,
        members=MEMBERS,
        backend=backend,
        reproducible=reproducible,
        shards=shards,
        name=name,
    )
    x, net = data(), DistributedDataParallel(model(), process_group=run.group)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    run.keep(model=net, optimizer=optimizer)
    for step in run.steps(1 << 30, samples=len(x), batch=BATCH):
        with step:
            for shard in step.shards:
                step.backward(net(x[step.sample_ids(shard)]).square().mean())
            step.commit(optimizer)
        yield


def steps_member(port: int, rank: int, backend: str, rounds: int) -> dict[str, list[float]]:
    """Seconds of a step of each contender, round by round, in turn."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group(backend, store=store, rank=rank, world_size=MEMBERS)
    group = dist.group.WORLD
    assert group is not None
    contenders: dict[str, Iterator[None]] = {
        "DistributedDataParallel": plain(group),
        "elastic": elastic_steps(store, backend, "plain", reproducible=False, shards=8),
        "elastic, tree of 2 shards": elastic_steps(
            store, backend, "two", reproducible=True, shards=2
        ),
        "elastic, tree of 8 shards": elastic_steps(
            store, backend, "eight", reproducible=True, shards=8
        ),
    }
    taken: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds + 1):
        names = list(contenders)
        random.Random(number).shuffle(names)  # the same order on all members
        for name in names:
            began = time.perf_counter()
            for _ in range(BLOCK):
                next(contenders[name])
            if number >= 1:
                taken[name].append((time.perf_counter() - began) / BLOCK)
    return taken


def measure_steps(rounds: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for backend in ("shm", "gloo"):
        store = elastic.serve_store()
        command = [sys.executable, "-m", "benchmarks.elastic", "_member", backend]
        processes = [
            subprocess.Popen(
                [*command, str(store.port), str(rank), str(rounds)], stdout=subprocess.PIPE
            )
            for rank in range(MEMBERS)
        ]
        output = processes[0].communicate(timeout=170)[0]
        for process in processes:
            process.wait(timeout=20)
        taken = json.loads(output.splitlines()[-1])
        base = taken["DistributedDataParallel"]
        found[backend] = {
            name: {
                "ms": _quartiles([1e3 * s for s in seconds]),
                "ratio": _quartiles([s / b for s, b in zip(seconds, base, strict=True)]),
            }
            for name, seconds in taken.items()
        }
    return found


def _quartiles(values: list[float]) -> dict[str, float]:
    low, middle, high = statistics.quantiles(values, n=4)
    return {"median": round(middle, 4), "low": round(low, 4), "high": round(high, 4)}


# -- from SIGKILL to the next committed step -----------------------------------------------


def trainer(kind: str, log: Path) -> None:
    """A member of an elastic run, or a worker of torchrun; writes the time of each commit."""
    torch.set_num_threads(1)
    with log.open("a", buffering=1) as file:

        def committed(number: int) -> None:
            file.write(f"{time.monotonic()} {os.getpid()} {number}\n")

        if kind == "torchrun":
            _torchrun_worker(log.with_suffix(".pt"), committed)
        else:
            _member(kind, committed)


def _member(backend: str, committed: Callable[[int], None]) -> None:
    run = elastic.join(backend=backend)
    x, net = data(), model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    run.keep(model=net, optimizer=optimizer)
    for step in run.steps(1 << 30, samples=len(x), batch=BATCH):
        with step:
            for shard in step.shards:
                step.backward(net(x[step.sample_ids(shard)]).square().mean())
            step.commit(optimizer)
        committed(run.version)


def _torchrun_worker(checkpoint: Path, committed: Callable[[int], None]) -> None:
    dist.init_process_group("gloo")
    x, net = data(), model()
    done = 0
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        net.load_state_dict(state["model"])
        done = state["step"]
    wrapped = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    samples = elastic.Samples(len(x), batch=BATCH, shards=MEMBERS)
    while True:
        ids = samples.ids(done, elastic.Shard(dist.get_rank(), dist.get_rank() + 1))
        optimizer.zero_grad()
        wrapped(x[ids]).square().mean().backward()
        optimizer.step()
        done += 1
        if dist.get_rank() == 0:
            partial = checkpoint.with_suffix(".partial")
            torch.save({"model": net.state_dict(), "step": done}, partial)
            partial.rename(checkpoint)
        committed(done)


def recovery(kind: str) -> float:
    """Seconds from SIGKILL of one of two processes to the next step that is committed."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        log.touch()
        own = [sys.executable, "-m", "benchmarks.elastic", "_trainer", kind, str(log)]
        if kind == "torchrun":
            launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
            command = [sys.executable, *launcher, str(MEMBERS), "--max-restarts", "3", *own[1:]]
        else:
            supervisor = ["-m", "gradwire.elastic", "--nproc-per-node", str(MEMBERS)]
            command = [sys.executable, *supervisor, *own[1:]]
        launched = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        try:
            return _kill_and_wait(log)
        finally:
            launched.send_signal(signal.SIGTERM)
            threading.Timer(15, launched.kill).start()
            launched.wait()


def _kill_and_wait(log: Path) -> float:
    pids = _until(lambda: _pids_after(log, 20))
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
    later = _until(lambda: found if len(found := next_commit()) >= 2 else [])
    second: float = sorted(later)[1]
    return second - killed


def _pids_after(log: Path, number: int) -> list[int]:
    found = {int(line.split()[1]) for line in _lines(log) if int(line.split()[2]) >= number}
    return sorted(found) if len(found) == MEMBERS else []


def _lines(log: Path) -> list[str]:
    text = log.read_text()
    return text[: text.rfind("\n") + 1].splitlines()


def _until(found: Callable[[], list[Any]]) -> list[Any]:
    deadline = time.monotonic() + 60
    while not (result := found()):
        if time.monotonic() > deadline:
            raise TimeoutError("nothing was committed for a minute")
        time.sleep(0.002)
    return result


def measure_recovery(times: int) -> dict[str, Any]:
    kinds = ("shm", "gloo", "torchrun")
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(times):
        for kind in kinds:
            seconds[kind].append(round(recovery(kind), 4))
            print(kind, seconds[kind][-1], flush=True)
    return {
        kind: {"median": statistics.median(found), "worst": max(found), "all": found}
        for kind, found in seconds.items()
    }


def main() -> None:
    if sys.argv[1] == "_member":
        backend, port, rank, rounds = sys.argv[2:]
        print(json.dumps(steps_member(int(port), int(rank), backend, int(rounds))), flush=True)
        os._exit(0)
    if sys.argv[1] == "_trainer":
        trainer(sys.argv[2], Path(sys.argv[3]))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["steps", "recovery"])
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    measure = measure_steps if options.what == "steps" else measure_recovery
    found = measure(options.times)
    result = {
        "what": options.what,
        "date": datetime.now(timezone.utc).isoformat(timespec="minutes"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cores": len(os.sched_getaffinity(0)),
        "times": options.times,
        "results": found,
    }
    print(json.dumps(result, indent=1))
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
