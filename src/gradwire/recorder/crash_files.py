"""Files that outlive any end of a process: the ring, crashes in C, and stacks on request.

The report of crashes is named after the process until its rank is known, and the others do not
exist before: child processes of a rank, which inherit its environment, leave none.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any, TextIO

from gradwire.recorder.aborts import abort_at_once, delay_aborts, is_abort
from gradwire.recorder.files import CRASH, RING, STACKS
from gradwire.recorder.groups import known_groups
from gradwire.recorder.kernel import STACKS_SIGNAL
from gradwire.recorder.lines import call_stack, is_users, read_line
from gradwire.recorder.recording import ring
from gradwire.recorder.ring_file import RingFile

_SILENT_NS = 1_000_000_000  # Python did not run for so long
_PAUSE_NS = 50_000_000
_MOST = 64
_FRAMES = 6
_REPORT_SECONDS = 0.02  # faulthandler writes its report in less


class CrashFiles:
    """Files of this process in a directory.

    Attributes:
        silences: Times in which no Python code ran: begin, end (wall clock, ns) and CPU time (ns).
        pauses: Long garbage collections: begin (wall clock) and duration, in ns.
        stacks: File that faulthandler writes stacks to on a signal; None if it does not.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._name = f"of-process-{socket.gethostname()}-{os.getpid()}"  # unique across containers
        self._pid = os.getpid()
        self._crashes: TextIO | None = None
        self._delays_aborts = False
        self._stacks: TextIO | None = None
        self.silences: list[tuple[int, int, int]] = []
        self.pauses: list[tuple[int, int]] = []
        self._last_beat = (0, 0)
        self._collecting = 0
        self._file: RingFile | None = None
        self.stacks: Path | None = None

    def start(self) -> None:
        """Enable faulthandler for crashes, unless it is enabled, and note garbage collections."""
        gc.callbacks.append(self._on_collection)
        if not faulthandler.is_enabled():
            # Gloo aborts a process that receives a message of an unexpected size
            self._crashes = self._path(CRASH).open("w")
            self._delays_aborts = delay_aborts()
            faulthandler.enable(self._crashes)
            os.register_at_fork(after_in_child=self._disable)

    def announce(self, rank: int) -> None:
        """Create the files of a rank, or name them after its new rank."""
        old, self._name = [self._path(kind) for kind in (RING, CRASH, STACKS)], str(rank)
        new = [self._path(kind) for kind in (RING, CRASH, STACKS)]
        for before, after in zip(old, new, strict=True):
            with contextlib.suppress(FileNotFoundError):
                before.replace(after)
        if self._file is None:
            with contextlib.suppress(OSError):  # a full disk: the program goes on without it
                self._file = ring.file = RingFile(self._path(RING))
        if STACKS_SIGNAL is not None:
            self.stacks = self._path(STACKS)
            if self._stacks is None:
                self._stacks = self.stacks.open("w")
                faulthandler.register(STACKS_SIGNAL, self._stacks, all_threads=True)

    def beat(self) -> None:
        """Write that Python runs, the counts of groups, and the main thread's line."""
        if self._file is None:
            return
        now, cpu = time.time_ns(), time.process_time_ns()
        since, used = self._last_beat
        if since and now - since > _SILENT_NS and len(self.silences) < _MOST:
            self.silences.append((since, now, cpu - used))
        self._last_beat = now, cpu
        counts = {name: info.count() for name, info in known_groups().items()}
        self._file.beat({"counts": counts, "stack": _main_stack(), "cpu": cpu})

    def is_aborting(self) -> bool:
        """Return True if C code aborts this process, whose end waits for a dump."""
        if not self._delays_aborts or self._crashes is None or self._crashes.closed:
            return False
        if not os.fstat(self._crashes.fileno()).st_size or not is_abort(self._path(CRASH)):
            return False
        time.sleep(_REPORT_SECONDS)
        return True

    def _disable(self) -> None:
        """Disable faulthandler; a fork's crash is not this process's."""
        if self._crashes is not None and not self._crashes.closed:
            faulthandler.disable()
            if self._delays_aborts:
                abort_at_once()
            self._crashes.close()

    def forget_crash(self) -> None:
        """Remove the empty files of a process that ends by itself."""
        if os.getpid() != self._pid:
            return
        with contextlib.suppress(OSError):
            if self._crashes is not None:
                self._path(CRASH).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            if self.stacks is not None and not self.stacks.stat().st_size:
                self.stacks.unlink()

    def stop(self) -> None:
        """Undo `start`."""
        ring.file = None
        with contextlib.suppress(ValueError):
            gc.callbacks.remove(self._on_collection)
        if os.getpid() != self._pid:
            return
        self._disable()
        if self._stacks is not None and STACKS_SIGNAL is not None:
            faulthandler.unregister(STACKS_SIGNAL)
            self._stacks.close()
        self.forget_crash()
        if self._file is not None:
            self._file.close()
            self._path(RING).unlink(missing_ok=True)

    def _path(self, kind: str) -> Path:
        return self._directory / kind.format(self._name)

    def _on_collection(self, phase: str, info: dict[str, Any]) -> None:
        if phase == "start":
            self._collecting = time.perf_counter_ns()
            return
        took = time.perf_counter_ns() - self._collecting
        if took > _PAUSE_NS and len(self.pauses) < _MOST and os.getpid() == self._pid:
            self.pauses.append((time.time_ns() - took, took))


def _main_stack() -> list[dict[str, Any]]:
    """Return the innermost frame of the main thread and the user's lines, innermost first."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    locations = call_stack(frame)
    kept = [
        location
        for number, location in enumerate(locations)
        if number < 2 or is_users(location[0].co_filename)
    ]
    return [read_line(at) | {"user": is_users(at[0].co_filename)} for at in kept[:_FRAMES]]
