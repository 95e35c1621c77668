"""Trial of a backend between processes, with a time limit and a store in a file.

A TCP store would need a network, which may be missing.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire import collectives as c
from gradwire._limits import cores
from gradwire._processes import Child, kill_all, spawn
from gradwire.testing import gradcheck

BACKENDS = ("shm", "gloo", "nccl")
_LIMIT_SECONDS = 90.0
_GROUP_SECONDS = 20.0
_SMALL, _LARGE = 10, 1 << 22  # elements of 4 bytes
_CALLS, _LARGE_CALLS = 200, 6
_SHAPE = (2, 1)  # per rank; each element costs several calls


def _pairs() -> list[tuple[int, int]]:
    world = dist.get_world_size()
    return [(rank, (rank + 1) % world) for rank in range(world)]


def _around(x: Tensor) -> Tensor:
    world, rank = dist.get_world_size(), dist.get_rank()
    return c.send_recv(x, (rank + 1) % world, (rank - 1) % world)


def _repeated(x: Tensor) -> Tensor:
    """Return as many rows for each rank."""
    return x.repeat(dist.get_world_size(), 1)


OPS: Mapping[str, Callable[[Tensor], Any]] = {
    "all_gather": c.all_gather,
    "all_gather_coalesced": lambda x: c.all_gather_coalesced([x, 2 * x]),
    "all_gather_list": c.all_gather_list,
    "all_reduce": c.all_reduce,
    "all_reduce avg": lambda x: c.all_reduce(x, "avg"),
    "all_reduce max": lambda x: c.all_reduce(x, "max"),
    "all_reduce product": lambda x: c.all_reduce(x, "product"),
    "all_reduce_coalesced": lambda x: c.all_reduce_coalesced([x, 2 * x]),
    "all_to_all": lambda x: c.all_to_all(_repeated(x)),
    "broadcast": lambda x: c.broadcast(x, 0),
    "gather": lambda x: c.gather(x, 0),
    "halo_exchange": lambda x: c.halo_exchange(x, 1),
    "ppermute": lambda x: c.ppermute(x, _pairs()),
    "reduce": lambda x: c.reduce(x, 0),
    "reduce_scatter": lambda x: c.reduce_scatter(_repeated(x)),
    "reduce_scatter_coalesced": lambda x: c.reduce_scatter_coalesced([_repeated(x)]),
    "scatter": lambda x: c.scatter(_repeated(x), 0),
    "send_recv": _around,
    "shift": c.shift,
}


@dataclass
class Trial:
    """Result of trying a backend.

    Attributes:
        backend: Name of the backend.
        works: True if ranks could use it.
        reason: Error, or the missing requirement if it was not tried; "" if it works.
        tried: True if it was tried.
        busy: True if it failed while the load average exceeded the number of cores.
        latency_us: Median time of an all_reduce of 40 bytes.
        bandwidth_mb: MB per second of an all_reduce of 16 MiB.
        gradients: Number of ops with right gradients, and number of ops.
        wrong: Errors of wrong gradients, by op.
        warnings: Warnings it raised.
    """

    backend: str
    works: bool = False
    reason: str = ""
    tried: bool = True
    busy: bool = False
    latency_us: float = 0.0
    bandwidth_mb: float = 0.0
    gradients: tuple[int, int] = (0, len(OPS))
    wrong: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


def try_backend(backend: str, nproc: int, *, gradients: bool = True) -> Trial:
    """Try a backend between new processes, and kill them afterwards."""
    if reason := _lacks(backend, nproc):
        return Trial(backend, reason=reason, tried=False)
    try:
        folder = tempfile.TemporaryDirectory(prefix="gradwire-doctor-")
    except OSError:  # a missing temporary folder is reported by the checks
        folder = tempfile.TemporaryDirectory(prefix="gradwire-doctor-", dir="/dev/shm")
    with folder as place:
        ranks: list[Child] = []
        try:
            for rank in range(nproc):
                store = str(Path(place) / "store")
                ranks.append(spawn(_rank, backend, rank, nproc, store, gradients))
            return _unless_busy(_result(backend, ranks), nproc)
        finally:
            kill_all([process for process, _ in ranks])


def _unless_busy(trial: Trial, nproc: int) -> Trial:
    """Return the trial, marked as unclear if it failed on a machine that had no time for it."""
    load = os.getloadavg()[0]
    if not trial.works and load > max(cores(), nproc):
        busy = f"the load average was {load:.1f} on {cores():g} cores: try again when it is lower"
        return replace(trial, busy=True, reason=f"{trial.reason}; {busy}")
    return trial


def _lacks(backend: str, nproc: int) -> str:
    """Return a requirement of the backend that this machine lacks; "" if there is none."""
    if not dist.is_backend_available(backend):
        return "this build of PyTorch lacks it"
    if backend == "nccl" and torch.cuda.device_count() < nproc:
        return f"it needs {nproc} GPUs, one per process; there are {torch.cuda.device_count()}"
    return ""


def _result(backend: str, ranks: list[Child]) -> Trial:
    """Return rank 0's trial, or the first failure."""
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
    """Run one process of a trial."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the reason contains the error
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


def _times(x: Tensor, calls: int) -> list[float]:
    taken = []
    for _ in range(calls):
        start = time.perf_counter()
        dist.all_reduce(x)
        if x.is_cuda:
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - start)
    return taken


def wrong_gradients() -> dict[str, str]:
    """Return errors of ops with wrong gradients in the default group; all ranks call it."""
    wrong = {}
    for name, op in OPS.items():
        generator = torch.Generator().manual_seed(dist.get_rank())
        x = torch.randn(_SHAPE, dtype=torch.float64, generator=generator).requires_grad_()
        try:
            gradcheck(op, (x,))
        except Exception as error:
            wrong[name] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return wrong
