"""Anonymous shared memory: a memfd that cannot shrink, and tensors over it.

The memory is allocated at once, so that a host without enough raises an error here instead of
crashing at the first access. The kernel frees it when the last process that maps it ends.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

from gradwire._limits import check_available
from gradwire._processes import after_fork
from gradwire.errors import DistributedError

_KEEP_SIZE, _PUNCH_HOLE, _MAP_FIXED = 1, 2, 0x10  # constants of Linux that Python lacks
_ALLOCATED_AT_ONCE = 64 << 20
"""Size of pieces whose availability is checked: other ranks allocate at the same time."""


@contextmanager
def _as_distributed_error(size: int) -> Iterator[None]:
    try:
        yield
    except (OSError, MemoryError) as error:
        raise DistributedError(
            f"not enough memory for {size} bytes of shared memory ({error}): free memory, raise "
            "the limit of the process or container, or use the gloo backend"
        ) from error


def _allocate(fd: int, offset: int, size: int) -> None:
    for start in range(0, size, _ALLOCATED_AT_ONCE):
        check_available(size - start)
        os.posix_fallocate(fd, offset + start, min(_ALLOCATED_AT_ONCE, size - start))


class GrowingMemory:
    """One descriptor for all memory that a rank shares: it grows, and is sent to peers once."""

    fd = -1

    def __init__(self) -> None:
        import fcntl  # here: missing, or without seals, on systems other than Linux

        # A descriptor per allocation would be in flight to every peer at the same time, and the
        # kernel limits a process's descriptors in flight like its open ones (`ulimit -n`).
        self.fd = os.memfd_create("gradwire", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        # `os` may be gone when `__del__` runs at the interpreter's exit
        self._close, self._end = os.close, 0
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)

    def allocate(self, size: int) -> int:
        """Allocate `size` bytes of zeros and return their offset."""
        offset = self._end
        with _as_distributed_error(size):
            try:
                _allocate(self.fd, offset, max(size, 1))  # an empty tensor is mapped as well
            except BaseException:
                self.free(offset, size)
                raise
        self._end += _whole_pages(size)
        return offset

    def free(self, offset: int, size: int) -> None:
        """Free an allocation that no rank reads any more."""
        # Its offset is not reused: a file may be much longer than the host's memory.
        flags = _KEEP_SIZE | _PUNCH_HOLE
        _libc().fallocate(self.fd, flags, offset, _whole_pages(size))

    def __del__(self) -> None:
        if self.fd >= 0:  # the descriptor could be made
            self._close(self.fd)


def create(size: int) -> int:
    """Return a descriptor of `size` new bytes of zeros, which the caller closes."""
    with _as_distributed_error(size):
        memory = GrowingMemory()
        memory.allocate(size)
        return os.dup(memory.fd)


def _whole_pages(size: int) -> int:
    return -(-max(size, 1) // mmap.PAGESIZE) * mmap.PAGESIZE


def check_sealed(fd: int, size: int = 0) -> None:
    """Raise unless memory from a peer is and stays large enough, or an access would crash."""
    import fcntl

    if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
        raise DistributedError(
            "a peer sent memory that could shrink: check that the peer runs gradwire"
        )
    if os.fstat(fd).st_size < size:
        raise DistributedError(
            f"a peer sent {os.fstat(fd).st_size} bytes of memory, but {size} are needed: check "
            "that all ranks have the same version of gradwire and the same world size"
        )


class Mapping:
    """Mapping of a descriptor's memory in this process's address space."""

    def __init__(
        self,
        fd: int,
        on_unmap: Callable[[], None] | None = None,
        offset: int = 0,
        size: int | None = None,
    ) -> None:
        # `fd` can be closed afterwards; `offset` is a multiple of the page size
        size = os.fstat(fd).st_size if size is None else size
        memory = _array_type(size).from_address(_map(fd, size, offset))
        # called just before the memory is unmapped, in any thread
        memory.on_unmap = on_unmap
        self.bytes = memoryview(memory).cast("B")
        with torch.inference_mode(False):  # it may be written outside inference mode later
            # the memory is unmapped with the last tensor of this storage
            self.flat = torch.frombuffer(memory, dtype=torch.uint8)


_PRIVATE_IN_CHILDREN: dict[int, tuple[GrowingMemory, int, int]] = {}
"""Memory of users' tensors by address: memory, offset and size."""


def map_for_user(
    memory: GrowingMemory, offset: int, size: int, on_unmap: Callable[[int], None]
) -> Tensor:
    """Map an allocation of this rank as a uint8 tensor that a forked child cannot change."""

    def end() -> None:
        _PRIVATE_IN_CHILDREN.pop(address, None)
        on_unmap(address)

    flat = Mapping(memory.fd, end, offset, size).flat
    address = flat.data_ptr()
    _PRIVATE_IN_CHILDREN[address] = (memory, offset, size)
    return flat


def _make_private() -> None:
    """Map the parent's tensors copy-on-write in a forked child."""
    # A data loader's worker that zeroes inherited gradients must not zero those of its parent.
    for address, (memory, offset, size) in list(_PRIVATE_IN_CHILDREN.items()):
        flags = mmap.MAP_PRIVATE | _MAP_FIXED
        _libc().mmap(address, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, memory.fd, offset)


after_fork(_make_private)


@cache
def _libc() -> Any:
    """Return the C library; Python's mmap would keep a descriptor open while memory is mapped."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]
    return libc


def _map(fd: int, size: int, offset: int) -> int:
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    address: int = _libc().mmap(None, size, protection, mmap.MAP_SHARED, fd, offset)
    if address == ctypes.c_void_p(-1).value:
        reason = os.strerror(ctypes.get_errno())
        raise DistributedError(
            f"{size} bytes of shared memory cannot be mapped ({reason}): free memory, or use the "
            "gloo backend"
        )
    return address


def _array_type(size: int) -> Any:
    """Return a ctypes array type over mapped memory, which unmaps it when an array is deleted."""

    # bound here: the module's globals may be gone when the last array is deleted
    unmap, address_of = _libc().munmap, ctypes.addressof

    def end(self: Any) -> None:
        if self.on_unmap is not None:
            self.on_unmap()
        unmap(address_of(self), size)

    return type("SharedBytes", (ctypes.c_ubyte * size,), {"__del__": end})
