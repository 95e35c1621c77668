"""Shared memory without a name: a memfd that cannot shrink, and tensors over it.

Its memory is taken when it is made, so that a host without room is an error here and not a crash
at first touch, and given back by the kernel when the last process that maps it is gone.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from gradwire.errors import DistributedError
from gradwire.shm.room import check_room

__all__ = ["Mapping", "check_sealed", "create", "map_tensor"]

_TAKEN_AT_ONCE = 64 << 20
"""Before each such piece the question is asked anew: other ranks take memory at the same time."""


def create(size: int) -> int:
    """A descriptor of `size` bytes of new memory, zeros; the caller closes it.

    Raises:
        DistributedError: The host has not that much memory for this process; none is taken.
    """
    try:
        return _create(size)
    except (OSError, MemoryError) as error:
        raise DistributedError(
            f"no room for {size} bytes of shared memory ({error}): free memory, raise the "
            "process's or container's limit, or use the gloo backend"
        ) from error


def _create(size: int) -> int:
    import fcntl  # not there, or without seals, where there is no Linux

    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    fd = os.memfd_create("gradwire", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        for start in range(0, size, _TAKEN_AT_ONCE):
            check_room(size - start)
            os.posix_fallocate(fd, start, min(_TAKEN_AT_ONCE, size - start))
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    except BaseException:
        os.close(fd)
        raise
    return fd


def check_sealed(fd: int, size: int = 0) -> None:
    """Raise if memory from a peer is too small or could become so: touching it would crash.

    Raises:
        DistributedError: It could.
    """
    import fcntl

    if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
        raise DistributedError("a peer sent memory that could shrink: is it gradwire that sent it?")
    if os.fstat(fd).st_size < size:
        raise DistributedError(
            f"a peer sent {os.fstat(fd).st_size} bytes of memory, but {size} are needed: have all "
            "ranks the same version of gradwire, and the same world size?"
        )


class Mapping:
    """What a process knows of a descriptor's memory that it maps.

    Attributes:
        bytes: The memory.
        flat: A uint8 tensor over it; the memory is unmapped with the last tensor of its storage.
    """

    def __init__(self, fd: int, ended: Callable[[], None] | None = None) -> None:
        size = os.fstat(fd).st_size
        memory = _array_type(size).from_address(_map(fd, size))
        memory.ended = ended
        self.bytes = memoryview(memory).cast("B")
        with torch.inference_mode(False):  # it may be used outside, whoever made it
            self.flat = torch.frombuffer(memory, dtype=torch.uint8)


def map_tensor(fd: int, ended: Callable[[], None] | None = None) -> Tensor:
    """A descriptor's memory as a uint8 tensor.

    Args:
        fd: The descriptor; it can be closed afterwards.
        ended: Called just before the memory is unmapped, in whatever thread that is.
    """
    return Mapping(fd, ended).flat


@cache
def _libc() -> Any:
    """Python's own mmap would keep a descriptor open for as long as the memory is mapped."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return libc


def _map(fd: int, size: int) -> int:
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    address: int = _libc().mmap(None, size, protection, mmap.MAP_SHARED, fd, 0)
    if address == ctypes.c_void_p(-1).value:
        reason = os.strerror(ctypes.get_errno())
        raise DistributedError(
            f"{size} bytes of shared memory cannot be mapped ({reason}): free memory, or use the "
            "gloo backend"
        )
    return address


def _array_type(size: int) -> Any:
    """An array over memory that someone else mapped, which unmaps it at its end."""

    unmap, address_of = _libc().munmap, ctypes.addressof  # this module may be gone before them

    def end(self: Any) -> None:
        if self.ended is not None:
            self.ended()
        unmap(address_of(self), size)

    return type("SharedBytes", (ctypes.c_ubyte * size,), {"__del__": end})
