"""What `run_ranks` and its worker processes say to each other, and how it crosses a socket.

A message is a pickled object behind its length. Every wait has a deadline, so that a process that
stops in the middle of a message cannot take the other one with it.
"""

from __future__ import annotations

import pickle
import socket
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

__all__ = ["Channel", "Idle", "Message", "Raised", "Release", "Returned", "Task"]

_LENGTH = struct.Struct("!Q")


@dataclass(frozen=True)
class Task:
    """To a worker: join a group as `rank` and call the pickled function."""

    call: bytes
    rank: int
    world_size: int
    backend: str
    store_port: int
    timeout: float
    path: tuple[str, ...]
    directory: str
    environment: Mapping[str, str]


@dataclass(frozen=True)
class Release:
    """To a worker that returned: no rank needs the group any more, leave it."""


@dataclass(frozen=True)
class Idle:
    """From a worker: ready for a task, and in no group."""


@dataclass(frozen=True)
class Returned:
    """From a worker: the function's result, pickled."""

    result: bytes


@dataclass(frozen=True)
class Raised:
    """From a worker: an exception, as text and, where that can be done, pickled."""

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
            EOFError: The other process is gone.
        """
        data = pickle.dumps(message)
        self._limit(deadline)
        try:
            self._socket.sendall(_LENGTH.pack(len(data)) + data)
        except ConnectionError as error:
            raise EOFError from error

    def receive(self, deadline: float | None = None) -> Message:
        """Receive a message; the errors are those of `send`."""
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size, deadline))
        message: Message = pickle.loads(self._read(length, deadline))
        return message

    def _read(self, length: int, deadline: float | None) -> bytearray:
        data = bytearray(length)
        rest = memoryview(data)
        while rest:
            self._limit(deadline)
            try:
                count = self._socket.recv_into(rest)
            except ConnectionError as error:
                raise EOFError from error
            if count == 0:
                raise EOFError
            rest = rest[count:]
        return data

    def _limit(self, deadline: float | None) -> None:
        # A timeout of 0 would mean "do not block" to the socket, which is another error.
        self._socket.settimeout(
            None if deadline is None else max(deadline - time.monotonic(), 1e-3)
        )
