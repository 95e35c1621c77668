"""A backend, really tried: between processes, with a time limit, over a store in a file.

A store over TCP would need a network, which is one of the things that may be missing.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from gradwire.cli.doctor.gradients import OPS, wrong_gradients
from gradwire.cli.launch import exit_with_parent

__all__ = ["BACKENDS", "Trial", "try_backend"]

BACKENDS = ("shm", "gloo", "nccl")
_LIMIT_SECONDS = 90.0
_GROUP_SECONDS = 20.0
_SMALL, _LARGE = 10, 1 << 22  # elements of 4 bytes
_CALLS, _LARGE_CALLS = 200, 6


@dataclass
class Trial:
    """What came of trying a backend.

    Attributes:
        backend: Its name.
        works: Whether ranks could use it.
        reason: Why not; "" if they could. Of one that was not tried, what it needs.
        tried: Whether it was.
        latency_us: The median time of an all_reduce of 40 bytes.
        bandwidth_mb: MB a second of an all_reduce of 16 MiB.
        gradients: How many ops' gradients are right, and how many there are.
        wrong: Those that are wrong, with why.
        warnings: What it warned of.
    """

    backend: str
    works: bool = False
    reason: str = ""
    tried: bool = True
    latency_us: float = 0.0
    bandwidth_mb: float = 0.0
    gradients: tuple[int, int] = (0, len(OPS))
    wrong: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


def try_backend(backend: str, nproc: int, *, gradients: bool = True) -> Trial:
    """Try a backend between new processes; none of them is left."""
    if reason := _lacks(backend, nproc):
        return Trial(backend, reason=reason, tried=False)
    context = multiprocessing.get_context("spawn")
    try:
        folder = tempfile.TemporaryDirectory(prefix="gradwire-doctor-")
    except OSError:  # a missing folder is another problem than a backend's
        folder = tempfile.TemporaryDirectory(prefix="gradwire-doctor-", dir="/dev/shm")
    with folder as place:
        ranks: list[tuple[Any, Connection]] = []
        try:
            for rank in range(nproc):
                inbox, outbox = context.Pipe(duplex=False)
                arguments = (backend, rank, nproc, str(Path(place) / "store"), gradients, outbox)
                process = context.Process(target=_rank, args=arguments, daemon=True)
                process.start()
                outbox.close()
                ranks.append((process, inbox))
            return _result(backend, ranks)
        finally:
            for process, _ in ranks:
                process.kill()
                process.join()


def _lacks(backend: str, nproc: int) -> str:
    """What a backend needs and this machine has not."""
    if not dist.is_backend_available(backend):
        return "this build of PyTorch lacks it"
    if backend == "nccl" and torch.cuda.device_count() < nproc:
        return f"it needs a GPU for each process: {nproc}; there are {torch.cuda.device_count()}"
    return ""


def _result(backend: str, ranks: list[tuple[Any, Connection]]) -> Trial:
    """Rank 0's trial, or the first failure."""
    end = time.monotonic() + _LIMIT_SECONDS
    waiting = {rank: inbox for rank, (_, inbox) in enumerate(ranks)}
    found: dict[int, Trial] = {}
    while waiting:
        ready = wait(list(waiting.values()), max(0.0, end - time.monotonic()))
        for rank in [rank for rank, inbox in waiting.items() if inbox in ready]:
            try:
                found[rank] = waiting.pop(rank).recv()
            except (EOFError, OSError):
                found[rank] = Trial(backend, reason=f"the process of rank {rank} died")
            if not found[rank].works:
                return found[rank]
        if not ready:
            late = sorted(waiting)
            return Trial(backend, reason=f"ranks {late} did not end within {_LIMIT_SECONDS:g} s")
    return found[0]


def _rank(
    backend: str, rank: int, nproc: int, store: str, gradients: bool, outbox: Connection
) -> None:
    """One process of a trial."""
    exit_with_parent()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what a backend says comes in its error
    torch.set_num_threads(1)
    trial = Trial(backend)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            _use(trial, rank, nproc, store, gradients=gradients)
        trial.warnings = [str(each.message) for each in caught if each.category is UserWarning]
        trial.works = True
    except Exception as error:
        trial.reason = f"{type(error).__name__}: {str(error).splitlines()[0][:300]}"
    outbox.send(trial)
    outbox.close()
    sys.stdout.flush()
    os._exit(0)


def _use(trial: Trial, rank: int, nproc: int, store: str, *, gradients: bool) -> None:
    dist.init_process_group(
        trial.backend,
        store=dist.FileStore(store, nproc),
        rank=rank,
        world_size=nproc,
        timeout=timedelta(seconds=_GROUP_SECONDS),
    )
    device = torch.device("cpu")
    if trial.backend == "nccl":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    small = torch.ones(_SMALL, dtype=torch.float32, device=device)
    large = torch.zeros(_LARGE, dtype=torch.float32, device=device)
    dist.all_reduce(small)
    if small[0].item() != nproc:
        raise RuntimeError(f"the sum of {nproc} ones was {small[0].item()}")
    small.zero_()
    trial.latency_us = 1e6 * median(_times(small, _CALLS))
    trial.bandwidth_mb = large.nbytes / 1e6 / median(_times(large, _LARGE_CALLS))
    if device.type == "cpu" and gradients:
        trial.wrong = wrong_gradients()
        trial.gradients = len(OPS) - len(trial.wrong), len(OPS)
    dist.barrier()


def _times(x: torch.Tensor, calls: int) -> list[float]:
    taken = []
    for _ in range(calls):
        start = time.perf_counter()
        dist.all_reduce(x)
        if x.is_cuda:
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - start)
    return taken
