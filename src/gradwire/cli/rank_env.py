"""The environment of one rank: its ranks and sizes, and how it joins the other ranks.

It comes from gradwire's own launcher or from torchrun's environment variables.
"""

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
    """One rank of a job.

    Args:
        rank: Among all processes.
        world_size: How many processes there are.
        local_rank: The rank on this host.
        local_size: How many processes this host has.
        store_port: The port of the launcher's store on this host; None under torchrun, whose
            environment variables have the address.
    """

    rank: int
    world_size: int
    local_rank: int
    local_size: int
    store_port: int | None = None

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> RankEnv | None:
        """The environment that torchrun gave this process; None if no launcher started it.

        Raises:
            ArgumentError: RANK is set, but what torchrun sets with it is not, or is no number.
        """
        if "RANK" not in environment:
            return None
        missing = [name for name in _TORCHRUN if name not in environment]
        if missing:
            raise ArgumentError(
                f"RANK={environment['RANK']} is set, as in a process that torchrun started, "
                f"without {', '.join(missing)}: start with torchrun, or unset RANK"
            )
        try:
            return cls(*(int(environment[name]) for name in _TORCHRUN[:4]))
        except ValueError as error:
            raise ArgumentError(
                f"{', '.join(_TORCHRUN[:4])} must be whole numbers ({error}): start with "
                "torchrun, or unset RANK"
            ) from error

    def device(self, backend: str) -> torch.device:
        """The device for this rank's tensors on `backend`: the CPU, or the rank's own GPU."""
        supported = dist.Backend.backend_capability.get(backend, ["cpu"])
        if "cpu" in supported:
            return torch.device("cpu")
        return torch.device(supported[0], self.local_rank)


def join_group(env: RankEnv, backend: str, timeout: timedelta) -> dist.ProcessGroup:
    """Initialize the default process group, and return it."""
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
    """End a rank's process without finalizing the interpreter.

    torch's DistributedDataParallel keeps the group's threads alive even after
    destroy_process_group, and one that frees a tensor after finalization aborts the process.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exitcode)
