"""Crash-proof ring: the last calls of a rank in a mapped file.

The kernel keeps the file's contents however the process ends: by SIGKILL, by a crash in C, or while
C code holds the GIL. A thread also notes, a few times per second, that Python runs, how many
collectives each group has counted, and the main thread's line. The file tells when a process ended
or stopped running Python, and what it was in.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import struct
import time
from pathlib import Path
from typing import Any

from gradwire.recorder.lines import read_line

_MAGIC = b"gwring1\0"
_HEADER = struct.Struct("<8sqqqqq")  # magic, pid, wall offset, calls, last beat, bytes of texts
_COUNT, _BEAT_TIME, _USED = 3, 4, 5  # indices of the header's integers
_SLOT = struct.Struct("<qqqII")  # number, begin, end, call, line
_SLOTS = 512
_BEAT_BYTES = 8192
_TEXT_BYTES = 1 << 17
_BEAT = _HEADER.size
_TEXTS = _BEAT + _BEAT_BYTES
_FIRST = _TEXTS + _TEXT_BYTES
_MOST_TEXTS = 10_000
SIZE = _FIRST + _SLOTS * _SLOT.size


class RingFile:
    """Mapped file that this process writes its calls to.

    Args:
        path: File to create.

    Raises:
        OSError: The file cannot be created, for example on a full disk.

    Attributes:
        integers: The file as 64-bit integers, of which `begin` returns the index of an end. Writing
            these one by one is faster than packing a slot.
    """

    def __init__(self, path: Path) -> None:
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
        self._kept: list[Any] = []  # code objects, whose IDs must not be reused
        wall = time.time_ns() - time.perf_counter_ns()
        _HEADER.pack_into(self._map, 0, _MAGIC, os.getpid(), wall, 0, 0, 0)
        self.integers = memoryview(self._map).cast("q")

    def begin(
        self, number: int, call: tuple[Any, ...], site: tuple[Any, int], at: int, *, cached: bool
    ) -> int:
        """Write a call that begins, and return the index of its end in `integers`.

        Args:
            number: Number of the collective in its group.
            call: Group, operation, sizes, dtype and peer; hashable.
            site: Code object and instruction of the user's line.
            at: Time on CLOCK_MONOTONIC, in ns.
            cached: False if the group has no name yet, so that the text is written again.
        """
        key = id(site[0]), site[1], call
        what = self._known.get(key)
        if what is None:
            what = self._describe(call, site)
            if cached and len(self._known) < _MOST_TEXTS:
                self._known[key] = what
                self._kept.append(site[0])
        index = (_FIRST >> 3) + self._count % _SLOTS * (_SLOT.size >> 3)
        integers = self.integers
        integers[index] = number
        integers[index + 1] = at
        integers[index + 2] = 0
        integers[index + 3] = what
        self._count += 1
        integers[_COUNT] = self._count
        return index + 2

    def _describe(self, call: tuple[Any, ...], site: tuple[Any, int]) -> int:
        """Write the texts of a call and its line, and return their numbers as one integer."""
        line = self._text({"line": read_line(site)})
        return line << 32 | self._text({"call": [str(part) for part in call]})

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
        """Append a text and return its number; 0 if there is no space left."""
        line = json.dumps(content).encode() + b"\n"
        if self._used + len(line) > _TEXT_BYTES:
            return 0
        self._map[_TEXTS + self._used : _TEXTS + self._used + len(line)] = line
        self._used += len(line)
        self.integers[_USED] = self._used
        return self._used  # the end of a line identifies it


def read_ring(path: Path) -> dict[str, Any] | None:
    """Return the contents of a ring file; None if it is not one.

    Returns:
        Keys "pid", "beat" (wall-clock time in ns), "state", and "calls", a list of dicts with keys
        "group", "number", "op", "sizes", "dtype", "peer", "line", "begin" and "end" (0 if open).
    """
    try:
        data = path.read_bytes()
        magic, pid, wall, count, beat, used = _HEADER.unpack_from(data)
        if magic != _MAGIC or len(data) != SIZE:
            return None
        texts = _read_texts(data[_TEXTS : _TEXTS + min(max(used, 0), _TEXT_BYTES)])
        state = json.loads(data[_BEAT:_TEXTS].partition(b"\0")[0] or b"{}")
    except (OSError, ValueError, struct.error):
        return None
    calls = []
    for index in range(max(0, count - _SLOTS), count):
        fields = _SLOT.unpack_from(data, _FIRST + index % _SLOTS * _SLOT.size)
        number, begin, end, call, line = fields
        what = texts.get(call, {}).get("call")
        if what:
            group, op, sizes, dtype, peer = what
            calls.append(
                {"group": group, "number": number, "op": op, "sizes": sizes, "dtype": dtype}
                | {"peer": peer, "line": texts.get(line, {}).get("line")}
                | {"begin": begin + wall, "end": end + wall if end else 0}
            )
    return {"pid": pid, "beat": beat, "state": state, "calls": calls}


def _read_texts(data: bytes) -> dict[int, dict[str, Any]]:
    found, end = {}, 0
    for line in data.splitlines(keepends=True):
        end += len(line)
        with contextlib.suppress(ValueError):
            found[end] = json.loads(line)
    return found
