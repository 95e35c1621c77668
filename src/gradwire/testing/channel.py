"""The messages between `run_ranks` and its worker processes, and the socket that carries them.

A message is a pickled object behind its length. Every wait has a deadline: a process that stops
within a message does not block the other one.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

__all__ = ["Channel", "Idle", "Message", "Raised", "Release", "Returned", "Task"]

_LENGTH = struct.Struct("!Q")


@dataclass(frozen=True)
class Task:
    """Request to a worker: join a group as `rank` and call the pickled function.

    The descriptor of the ranks' FileStore follows it.
    """

    call: bytes
    rank: int
    world_size: int
    backend: str
    timeout: float
    path: tuple[str, ...]
    directory: str
    environment: Mapping[str, str]
    host: str


@dataclass(frozen=True)
class Release:
    """Request to a worker that returned: leave the group, which no rank needs any longer."""


@dataclass(frozen=True)
class Idle:
    """Report of a worker: it is in no group and can take a task."""


@dataclass(frozen=True)
class Returned:
    """Report of a worker: the function's result, pickled."""

    result: bytes


@dataclass(frozen=True)
class Raised:
    """Report of a worker: an exception as text and, if it can be pickled, as an object."""

    summary: str
    traceback: str
    exception: bytes | None


Message: TypeAlias = Task | Release | Idle | Returned | Raised


class Channel:
    """One end of a socket pair over which messages travel."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock

    def fileno(self) -> int:
        """The descriptor, for `select`."""
        return self._socket.fileno()

    def close(self) -> None:
        """Close this end; the other one reads end-of-file."""
        self._socket.close()

    def send(self, message: Message, deadline: float | None = None) -> None:
        """Send a message; `deadline` is a `time.monotonic()` time, None for no limit.

        Raises:
            TimeoutError: The deadline passed.
            EOFError: The other process has ended.
        """
        data = pickle.dumps(message)
        with self._until(deadline):
            self._socket.sendall(_LENGTH.pack(len(data)) + data)

    def receive(self, deadline: float | None = None) -> Message:
        """Receive a message; the errors are those of `send`."""
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size, deadline))
        message: Message = pickle.loads(self._read(length, deadline))
        return message

    def send_descriptor(self, descriptor: int, deadline: float | None) -> None:
        """Send a duplicate of a descriptor."""
        with self._until(deadline):
            socket.send_fds(self._socket, [b"\0"], [descriptor])

    def receive_descriptor(self) -> int:
        """Receive a descriptor, which the caller must close."""
        with self._until(None):
            _, descriptors, _, _ = socket.recv_fds(self._socket, 1, 1)
        if not descriptors:
            raise EOFError
        os.set_inheritable(descriptors[0], False)
        return descriptors[0]

    def _read(self, length: int, deadline: float | None) -> bytearray:
        data = bytearray(length)
        rest = memoryview(data)
        while rest:
            with self._until(deadline):
                count = self._socket.recv_into(rest)
            if count == 0:
                raise EOFError
            rest = rest[count:]
        return data

    @contextlib.contextmanager
    def _until(self, deadline: float | None) -> Iterator[None]:
        # never 0, which would make the socket non-blocking: another error
        left = None if deadline is None else max(deadline - time.monotonic(), 1e-3)
        self._socket.settimeout(left)
        try:
            yield
        except ConnectionError as error:
            raise EOFError from error
