"""Files in a directory of dumps: their names, dumps, and the ring file. Read without PyTorch."""

from __future__ import annotations

import contextlib
import io
import json
import mmap
import os
import pickle
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType
from typing import Any

from gradwire._processes import LIBC
from gradwire.errors import ArgumentError
from gradwire.recorder.lines import Line, read_line

PREFIX = "rank_"
"""Prefix of a rank's dump."""
RING, CRASH, STACKS = "ring-{}", "crash-{}.txt", "stacks-{}.txt"
"""Files that outlive any end of the process."""
REQUEST = "request"
"""File that asks all ranks for dumps."""

MAX_BYTES = 1 << 28
"""Maximum size of a dump; dumps of 2,000 collectives take 2 MB."""
_SPARE_BYTES, _BYTES_PER_BYTE = 1 << 25, 64  # memory that loading a dump may take


# -- dumps ---------------------------------------------------------------------------------------


@dataclass
class ErrorRecord:
    """Error of a rank."""

    # "error", "uncaught" if the error ends the process, or "thread" if it ended another thread
    kind: str
    type: str
    message: str
    # model parameters that the error names
    parameters: list[str]
    # in ns: on CLOCK_MONOTONIC in dumps, of the wall clock when read
    time: int
    # stack of the error, the user's own code first
    lines: list[Line]
    # type names of its causes and contexts
    chain: list[str] = field(default_factory=list)
    # the error, or one of the chain, was raised by a call that waits for ranks
    waited: bool = False
    # function of torch.distributed that the user's line called; "" if none
    call: str = ""
    # value of each rank, if ranks disagree
    values: dict[int, str] = field(default_factory=dict)
    # raised by code that never waits for other ranks
    own: bool = False
    # a `raise` statement of Python raised the error, and each of its chain
    raised: bool = False
    # ranks that reported an error to this one, if the error says so
    reported: list[int] = field(default_factory=list)
    # since when the main thread had been in its line, or may have been, as `time`; 0 if unknown
    since: int = 0
    # the first error of the chain, with its message, and its stack
    root: str = ""
    root_lines: list[Line] = field(default_factory=list)

    def text(self, length: int = 600) -> str:
        """Return the message in one line, shortened in its middle: it ends with why."""
        text = " ".join(self.message.split())
        if len(text) <= length:
            return text
        return f"{text[: length * 2 // 3]} … {text[-length // 3 :]}"


# A pickle can call any function while it is loaded, and a dump may come from somebody else: all
# names are rejected.
class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it refers to {module}.{name}; dumps contain plain data only")


def loads(data: bytes) -> dict[str, Any]:
    """Load a dump from bytes; raise `ArgumentError` if they are none."""
    try:
        found = _PlainUnpickler(io.BytesIO(data)).load()
    except Exception as error:  # damaged pickles raise errors of any type
        raise ArgumentError(f"not a dump of a flight recorder: {error}") from error
    if not isinstance(found, dict) or not isinstance(found.get("entries", []), list):
        raise ArgumentError("not a dump of a flight recorder: it has no list of entries")
    return found


@contextlib.contextmanager
def _limited_memory(size: int) -> Iterator[None]:
    """Limit memory, on Linux: the unpickler allocates what a damaged file asks for."""
    if LIBC is None:
        yield
        return
    import resource  # here: missing on some systems

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    with contextlib.suppress(OSError, ValueError):
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + _SPARE_BYTES + _BYTES_PER_BYTE * size
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def load(path: Path) -> dict[str, Any]:
    """Load a dump from a file; raise `ArgumentError` if it is none."""
    if path.stat().st_size > MAX_BYTES:
        raise ArgumentError(f"{path} has {path.stat().st_size} bytes: not a flight recorder dump")
    try:
        # a bytearray that cannot be allocated makes C code print an error
        with _limited_memory(path.stat().st_size), contextlib.redirect_stderr(io.StringIO()):
            return loads(path.read_bytes())
    except ArgumentError as error:
        raise ArgumentError(f"{path}: {error}") from error


# -- ring file -----------------------------------------------------------------------------------

_MAGIC = b"gwring2\0"
_HEADER = struct.Struct("<8sqqqqq")  # magic, pid, wall offset, calls, last beat, bytes of texts
_COUNT, _BEAT_TIME, _USED = 3, 4, 5  # indices of the header's integers
_SLOT = struct.Struct("<qqqq")  # number, begin, end, text
_SLOTS = 512
_BEAT_BYTES = 8192
_TEXT_BYTES = 1 << 17
_BEAT = _HEADER.size
_TEXTS = _BEAT + _BEAT_BYTES
_FIRST = _TEXTS + _TEXT_BYTES
SIZE = _FIRST + _SLOTS * _SLOT.size


class RingFile:
    """Mapped file of this process's last calls; the kernel keeps it however the process ends."""

    def __init__(self, path: Path) -> None:
        # The process may end by SIGKILL, by a crash in C, or while C code holds the GIL. A thread
        # also notes, a few times per second, that Python runs, the counts of the groups, and the
        # main thread's line.
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            os.ftruncate(descriptor, SIZE)
            if hasattr(os, "posix_fallocate"):
                # now: to write a page that a full disk has no room for is a SIGBUS
                os.posix_fallocate(descriptor, 0, SIZE)
            self._map = mmap.mmap(descriptor, SIZE)
        finally:
            os.close(descriptor)
        self._count, self._used = 0, 0
        self._known: dict[Any, int] = {}
        self._kept: list[CodeType] = []  # code objects, whose IDs must not be reused
        wall = time.time_ns() - time.perf_counter_ns()
        _HEADER.pack_into(self._map, 0, _MAGIC, os.getpid(), wall, 0, 0, 0)
        # 64-bit integers: writing these one by one is faster than packing a slot
        self.integers = memoryview(self._map).cast("q")

    def begin(self, number: int, op: str, code: CodeType, instruction: int, at: int) -> int:
        """Write a call that begins, and return the index of its end in `integers`."""
        key = id(code), instruction, op
        text = self._known.get(key)
        if text is None:
            text = self._text({"op": op, "line": read_line((code, instruction))})
            if text:
                self._known[key] = text
                self._kept.append(code)
        index = (_FIRST >> 3) + self._count % _SLOTS * (_SLOT.size >> 3)
        integers = self.integers
        integers[index] = number
        integers[index + 1] = at
        integers[index + 2] = 0
        integers[index + 3] = text
        self._count += 1
        integers[_COUNT] = self._count
        return index + 2

    def beat(self, state: dict[str, Any]) -> None:
        """Write that Python runs now, and the state of the process."""
        text = json.dumps(state).encode()[: _BEAT_BYTES - 1]
        self._map[_BEAT : _BEAT + len(text) + 1] = text + b"\0"
        self.integers[_BEAT_TIME] = time.time_ns()

    def close(self) -> None:
        """Unmap the file; it stays where it is."""
        self.integers.release()
        self._map.close()

    def _text(self, content: dict[str, Any]) -> int:
        """Append a text and return its number, where it ends; 0 if there is no space left."""
        line = json.dumps(content).encode() + b"\n"
        if self._used + len(line) > _TEXT_BYTES:
            return 0
        self._map[_TEXTS + self._used : _TEXTS + self._used + len(line)] = line
        self._used += len(line)
        self.integers[_USED] = self._used
        return self._used


def read_ring(path: Path) -> dict[str, Any] | None:
    """Return the contents of a ring file; None if it is not one."""
    try:
        data = path.read_bytes()
        magic, pid, wall, count, beat, used = _HEADER.unpack_from(data)
        if magic != _MAGIC or len(data) != SIZE:
            return None
        state = json.loads(data[_BEAT:_TEXTS].partition(b"\0")[0] or b"{}")
    except (OSError, ValueError, struct.error):
        return None
    texts, end_of = {}, 0
    for line in data[_TEXTS : _TEXTS + min(max(used, 0), _TEXT_BYTES)].splitlines(keepends=True):
        end_of += len(line)
        with contextlib.suppress(ValueError):
            texts[end_of] = json.loads(line)
    calls = []
    for index in range(max(0, count - _SLOTS), count):
        slot = _FIRST + index % _SLOTS * _SLOT.size
        number, begin, end, text = _SLOT.unpack_from(data, slot)
        if text in texts:
            times = {"begin": begin + wall, "end": end + wall if end else 0}
            calls.append(texts[text] | {"number": number} | times)
    # "beat" is wall-clock time in ns; the "end" of an open call is 0
    return {"pid": pid, "beat": beat, "state": state, "calls": calls}
