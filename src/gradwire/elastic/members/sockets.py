"""Deadlines for sockets that PyTorch opened, and ends of waits that it cannot end."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
from collections.abc import Iterator

from torch.distributed import PrefixStore, Store, TCPStore


def own_connection(store: Store, seconds: float) -> Store:
    """Return a clone of the store whose requests have a deadline.

    Without it, PyTorch waits for a store whose process hangs, or whose host is unreachable, until
    the system closes the connection, possibly forever.
    """
    before = sockets()
    clone: Store = store.clone()  # type: ignore[attr-defined]
    whole = int(seconds)
    limit = struct.pack("ll", whole, int(1e6 * (seconds - whole)))
    port = _port_of(clone)
    for fd, inode in sockets().items():
        if before.get(fd) != inode and port in ports_of(fd):
            with _duplicate(fd) as duplicate:
                duplicate.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
                duplicate.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
    return clone


def _port_of(store: Store) -> int:
    """Return the port of a store's server; -1 for another kind of store."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store.port if isinstance(store, TCPStore) else -1


def sockets() -> dict[int, int]:
    """Return the inodes of this process's sockets by descriptor; empty without /proc."""
    found = {}
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                status = os.fstat(int(name))
                if stat.S_ISSOCK(status.st_mode):
                    found[int(name)] = status.st_ino
    return found


@contextlib.contextmanager
def _duplicate(fd: int) -> Iterator[socket.socket]:
    """Open a duplicate of a socket, which another thread may close meanwhile."""
    copy = os.dup(fd)
    try:
        blocks = os.get_blocking(copy)
        duplicate = socket.socket(fileno=copy)
        os.set_blocking(copy, blocks)  # socket.setdefaulttimeout changes it, for the original too
    except OSError:  # reused for something else
        os.close(copy)
        raise
    with duplicate:
        yield duplicate


def listening_port(fd: int) -> int:
    """Return the port that a socket listens on; 0 if it does not listen or was closed."""
    with contextlib.suppress(OSError), _duplicate(fd) as duplicate:
        listens = duplicate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        if listens and duplicate.family in (socket.AF_INET, socket.AF_INET6):
            return int(duplicate.getsockname()[1])
    return 0


def ports_of(fd: int) -> set[int]:
    """Return the ports of both ends of a connection; empty for other sockets."""
    with contextlib.suppress(OSError), _duplicate(fd) as duplicate:
        if duplicate.family in (socket.AF_INET, socket.AF_INET6):
            return {duplicate.getpeername()[1], duplicate.getsockname()[1]}
    return set()


def shut_down(connections: dict[int, int]) -> None:
    """Shut connections down, unless their descriptors have been reused."""
    now = sockets()
    for fd, inode in connections.items():
        if now.get(fd) == inode:
            with contextlib.suppress(OSError), _duplicate(fd) as duplicate:
                duplicate.shutdown(socket.SHUT_RDWR)
