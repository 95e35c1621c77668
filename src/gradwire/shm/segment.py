"""Shared memory without a name: a memfd that cannot shrink, and tensors over it.

Its memory is taken when it is made, so that a host without room is an error here and not a crash
at first touch, and given back by the kernel when the last process that maps it is gone.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Callable

import torch
from torch import Tensor

from gradwire.errors import DistributedError

__all__ = ["Mapping", "create", "map_bytes"]

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def create(size: int) -> int:
    """A descriptor of `size` bytes of new memory, zeros; the caller closes it.

    Raises:
        DistributedError: The host has not that much memory for this process.
    """
    fd = os.memfd_create("gradwire", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(fd, 0, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except OSError as error:
        os.close(fd)
        raise DistributedError(
            f"no room for {size} bytes of shared memory ({error}): free memory, raise the "
            "process's or container's limit, or use the gloo backend"
        ) from error
    return fd


class Mapping(mmap.mmap):
    """Mapped memory that says when nothing uses it any more.

    Attributes:
        ended: Called just before the memory is unmapped, in whatever thread that is.
    """

    ended: Callable[[], None] | None = None

    def __del__(self) -> None:
        if self.ended is not None:
            self.ended()


def map_bytes(fd: int) -> tuple[Mapping, Tensor]:
    """The descriptor's memory, and a uint8 tensor over it; the tensor keeps the mapping alive."""
    memory = Mapping(fd, os.fstat(fd).st_size, flags=mmap.MAP_SHARED)
    return memory, torch.frombuffer(memory, dtype=torch.uint8)
