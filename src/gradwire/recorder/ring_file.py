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
_SLOT = struct.Struct("<qqqII")  # number, begin, end, line, call
_COUNT, _BEAT_TIME, _USED = 24, 32, 40  # offsets in the header
_SLOTS = 512
_BEAT_BYTES = 8192
_TEXT_BYTES = 1 << 17
_BEAT = _HEADER.size
_TEXTS = _BEAT + _BEAT_BYTES
_FIRST = _TEXTS + _TEXT_BYTES
SIZE = _FIRST + _SLOTS * _SLOT.size
_END_OFFSET = 16  # of the end's time in a slot
_TIME = struct.Struct("<q")


class RingFile:
    """Mapped file that this process writes its calls to.

    Args:
        path: File to create.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            os.ftruncate(descriptor, SIZE)  # pages are allocated as they are written
            self._map = mmap.mmap(descriptor, SIZE)
        finally:
            os.close(descriptor)
        self._count, self._used = 0, 0
        self._wall = time.time_ns() - time.perf_counter_ns()
        self._sites: dict[Any, int] = {}
        self._kept: list[Any] = []  # code objects, whose IDs must not be reused
        self._write_header()

    def begin(self, number: int, call: tuple[Any, ...], site: tuple[Any, int], at: int) -> int:
        """Write a call that begins, and return the offset of its end for `end`.

        Args:
            number: Number of the collective in its group.
            call: Group, operation, sizes, dtype and peer; hashable.
            site: Code object and instruction of the user's line.
            at: Time on CLOCK_MONOTONIC, in ns.
        """
        key = id(site[0]), site[1]
        line, what = self._sites.get(key), self._sites.get(call)
        if line is None:
            self._kept.append(site[0])
            line = self._sites[key] = self._text({"line": read_line(site)})
        if what is None:
            what = self._sites[call] = self._text({"call": [str(part) for part in call]})
        offset = _FIRST + self._count % _SLOTS * _SLOT.size
        self._count += 1
        _SLOT.pack_into(self._map, offset, number, at, 0, line, what)
        _TIME.pack_into(self._map, _COUNT, self._count)
        return offset + _END_OFFSET

    def end(self, offset: int, at: int) -> None:
        """Write the time when a call ended."""
        _TIME.pack_into(self._map, offset, at)

    def beat(self, state: dict[str, Any]) -> None:
        """Write that Python runs now, and the state of the process."""
        text = json.dumps(state).encode()[: _BEAT_BYTES - 1]
        self._map[_BEAT : _BEAT + len(text) + 1] = text + b"\0"
        _TIME.pack_into(self._map, _BEAT_TIME, time.time_ns())

    def close(self) -> None:
        """Unmap the file; it stays where it is."""
        with contextlib.suppress(BufferError):
            self._map.close()

    def _write_header(self) -> None:
        _HEADER.pack_into(self._map, 0, _MAGIC, os.getpid(), self._wall, self._count, 0, self._used)

    def _text(self, content: dict[str, Any]) -> int:
        """Append a text and return its number; 0 if there is no space left."""
        line = json.dumps(content).encode() + b"\n"
        if self._used + len(line) > _TEXT_BYTES or len(self._sites) > 10_000:
            return 0
        self._map[_TEXTS + self._used : _TEXTS + self._used + len(line)] = line
        self._used += len(line)
        _TIME.pack_into(self._map, _USED, self._used)
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
        number, begin, end, line, call = fields
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
