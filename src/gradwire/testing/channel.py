"""The messages between `run_ranks` and its worker processes, and the socket that carries them.

A message is a pickled object behind its length. Every wait has a deadline: a process that stops
within a message does not block the other one.

Functions are pickled for processes that may be unable to import the modules that define them.
cloudpickle pickles lambdas and local functions by value, but a module's own functions and classes
by name, which fails for a test module that only pytest can import. Those go by value here too.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import socket
import struct
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.machinery import ModuleSpec
from types import FunctionType, ModuleType
from typing import Any, TypeAlias

from gradwire.errors import NotSupportedError

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
        """Return the descriptor, for `select`."""
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


def load_cloudpickle() -> ModuleType:
    """Return the cloudpickle module, or raise an error that says how to install it."""
    try:
        import cloudpickle
    except ImportError as error:
        raise NotSupportedError(
            "run_ranks sends functions with cloudpickle, which is not installed: "
            "pip install 'gradwire[test]'"
        ) from error
    module: ModuleType = cloudpickle
    return module


def dumps(value: object) -> bytes:
    """Pickle `value`, by value where a new process could not import what it refers to."""
    cloudpickle = load_cloudpickle()
    by_value: list[ModuleType] = []

    class Pickler(cloudpickle.CloudPickler):  # type: ignore[name-defined, misc]
        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, FunctionType | type):
                module = sys.modules.get(obj.__module__)
                if module is not None and not _importable(obj.__module__, tuple(sys.path)):
                    cloudpickle.register_pickle_by_value(module)
                    by_value.append(module)
            return super().reducer_override(obj)

    buffer = io.BytesIO()
    try:
        Pickler(buffer).dump(value)
    finally:
        for module in set(by_value):
            cloudpickle.unregister_pickle_by_value(module)
    return buffer.getvalue()


@lru_cache(maxsize=1024)
def _importable(name: str, path: tuple[str, ...]) -> bool:
    """Return True if a new process with this `sys.path` could import a module read from a file.

    Modules that packages create at run time (`torch.ops`, parts of extension modules) have no file;
    importing their package creates them again.
    """
    made_from = getattr(sys.modules[name], "__spec__", None)
    if made_from is None or not made_from.has_location or name == "__main__":
        return True
    search: Sequence[str] | None = None
    parts = name.split(".")
    for depth in range(1, len(parts) + 1):
        spec = _find(".".join(parts[:depth]), search)
        if spec is None:
            return False
        search = spec.submodule_search_locations
    return True


def _find(name: str, search: Sequence[str] | None) -> ModuleSpec | None:
    # importlib.util.find_spec would answer from sys.modules, which a new process does not have.
    found = (finder.find_spec(name, search) for finder in sys.meta_path)
    return next((spec for spec in found if spec is not None), None)
