"""Environment of one rank, from gradwire's launcher or from torchrun's environment variables."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist

from gradwire.errors import ArgumentError

_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class RankEnv:
    """Rank of a job.

    Args:
        rank: Rank among all processes.
        world_size: Number of processes.
        local_rank: Rank on this host.
        local_size: Number of processes on this host.
        store_port: Port of the launcher's store on this host; None under torchrun, whose
            environment variables contain the address.
    """

    rank: int
    world_size: int
    local_rank: int
    local_size: int
    store_port: int | None = None

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> RankEnv | None:
        """Return torchrun's environment of this process; None if no launcher started it.

        Raises:
            ArgumentError: RANK is set, but another variable of torchrun is missing or not a number.
        """
        if "RANK" not in environment:
            return None
        missing = [name for name in _TORCHRUN if name not in environment]
        if missing:
            raise ArgumentError(
                f"RANK={environment['RANK']} is set without {', '.join(missing)}: start with "
                "torchrun, or unset RANK"
            )
        try:
            return cls(*(int(environment[name]) for name in _TORCHRUN[:4]))
        except ValueError as error:
            raise ArgumentError(
                f"{', '.join(_TORCHRUN[:4])} must be whole numbers ({error}): start with "
                "torchrun, or unset RANK"
            ) from error

    def device(self, backend: str) -> torch.device:
        """Return the device of this rank's tensors on `backend`: the CPU, or the rank's GPU."""
        supported = dist.Backend.backend_capability.get(backend, ["cpu"])
        if "cpu" in supported:
            return torch.device("cpu")
        return torch.device(supported[0], self.local_rank)


def join_group(env: RankEnv, backend: str, timeout: timedelta) -> dist.ProcessGroup:
    """Initialize the default process group and return it."""
    store = None
    if env.store_port is not None:
        store = dist.TCPStore("127.0.0.1", env.store_port, is_master=False, timeout=timeout)
    device = env.device(backend)
    dist.init_process_group(
        backend,
        store=store,
        rank=env.rank,
        world_size=env.world_size,
        timeout=timeout,
        device_id=device if device.type != "cpu" else None,
    )
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def exit_rank(exitcode: int) -> NoReturn:
    """Exit a rank's process without finalizing the interpreter.

    torch's DistributedDataParallel keeps the group's threads alive after destroy_process_group. A
    thread that frees a tensor after finalization aborts the process.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exitcode)
