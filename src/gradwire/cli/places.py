"""Where one process of a job stands among the others: its ranks, and how it meets them.

A place comes from our own launcher or from torchrun's environment; what runs there cannot tell.
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

__all__ = ["Place", "join_group", "leave"]

_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Place:
    """One process of a job.

    Args:
        rank: Its number among all processes.
        world_size: How many processes there are.
        local_rank: Its number on this host.
        local_size: How many processes this host has.
        store_port: The port of the launcher's store on this host, or None where torchrun's
            environment says how to meet.
    """

    rank: int
    world_size: int
    local_rank: int
    local_size: int
    store_port: int | None = None

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Place | None:
        """The place torchrun gave this process, or None where no launcher started it.

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
        """The device whose tensors `backend` carries here: the CPU, or this rank's own GPU."""
        supported = dist.Backend.backend_capability.get(backend, ["cpu"])
        if "cpu" in supported:
            return torch.device("cpu")
        return torch.device(supported[0], self.local_rank)


def join_group(place: Place, backend: str, timeout: timedelta) -> dist.ProcessGroup:
    """Meet the other ranks; returns the default process group."""
    store = None
    if place.store_port is not None:
        store = dist.TCPStore("127.0.0.1", place.store_port, is_master=False, timeout=timeout)
    device = place.device(backend)
    dist.init_process_group(
        backend,
        store=store,
        rank=place.rank,
        world_size=place.world_size,
        timeout=timeout,
        device_id=device if device.type != "cpu" else None,
    )
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def leave(exitcode: int) -> NoReturn:
    """End a process that was a rank, without taking the interpreter down first.

    torch's DistributedDataParallel keeps the group's threads alive even after
    destroy_process_group, and one that has a tensor to let go of aborts the process when it finds
    the interpreter gone.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exitcode)
