"""End of this process: files that outlive it, and notes on `sys.exit` and `os._exit`.

The report of crashes is named after the process until its rank is known, and the others do not
exist before: child processes of a rank, which inherit its environment, leave none.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TextIO

from gradwire._processes import LIBC, after_fork
from gradwire.recorder.files import CRASH, RING, STACKS, RingFile
from gradwire.recorder.groups import known_groups
from gradwire.recorder.lines import MainThread, call_stack, is_users, marked, read_stack
from gradwire.recorder.processes import STACKS_SIGNAL
from gradwire.recorder.recording import Collections, ring

_SILENT_NS = 1_000_000_000  # Python did not run for so long
_PAUSE_NS = 50_000_000
_MOST = 64
_FRAMES = 6
_REPORT_SECONDS = 0.02  # faulthandler writes its report in less
_ABORT_REPORT = b"Fatal Python error: Aborted"
_LENGTH = 500

if LIBC is not None:
    LIBC.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
    LIBC.signal.restype = ctypes.c_void_p


class CrashFiles:
    """Files of this process in a directory: its ring file, crashes in C, and stacks on request."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._name = f"of-process-{socket.gethostname()}-{os.getpid()}"  # unique across containers
        self._pid = os.getpid()
        self._crashes: TextIO | None = None
        self._delays_aborts = False
        self._stacks: TextIO | None = None
        # times in which no Python code ran: begin, end (wall clock, ns) and CPU time (ns)
        self.silences: list[tuple[int, int, int]] = []
        # long garbage collections, once `start` was called
        self.collections: Collections | None = None
        self._last_beat = (0, 0)
        self._file: RingFile | None = None
        # file that faulthandler writes stacks to on a signal; None if it does not
        self.stacks: Path | None = None

    def start(self) -> None:
        """Enable faulthandler for crashes, unless it is enabled, and note garbage collections."""
        self.collections = Collections(_PAUSE_NS, _MOST)
        if not faulthandler.is_enabled():
            self._crashes = self._path(CRASH).open("w")
            if LIBC is not None:
                # Gloo aborts a process that receives a message of an unexpected size, in a thread
                # of C, in which no handler may run Python. So faulthandler, which runs first, is
                # followed by libc's `sleep`, whose argument is then the signal's number. In these
                # 6 s the recorder's thread writes a dump and ends the process. It cannot if the
                # thread that aborts holds the GIL: then the process ends when they are over.
                earlier = LIBC.signal(signal.SIGABRT, ctypes.cast(LIBC.sleep, ctypes.c_void_p))
                if earlier:  # the program's own
                    LIBC.signal(signal.SIGABRT, earlier)
                self._delays_aborts = not earlier
            faulthandler.enable(self._crashes)
            after_fork(self._disable)

    def is_aborting(self) -> bool:
        """Return True if C code aborts this process, whose end waits for a dump."""
        if not self._delays_aborts or self._crashes is None or self._crashes.closed:
            return False
        if not os.fstat(self._crashes.fileno()).st_size:
            return False
        with self._path(CRASH).open("rb") as report:
            if report.read(len(_ABORT_REPORT)) != _ABORT_REPORT:
                return False
        time.sleep(_REPORT_SECONDS)
        return True

    def end_aborted(self) -> None:
        """End this process by SIGABRT, while the thread that aborts sleeps."""
        if LIBC is not None:
            LIBC.signal(signal.SIGABRT, None)
            os.kill(os.getpid(), signal.SIGABRT)

    def announce(self, rank: int) -> None:
        """Create the files of a rank, or name them after its new rank."""
        if self.collections is None:
            return  # not started
        old, self._name = [self._path(kind) for kind in (RING, CRASH, STACKS)], str(rank)
        new = [self._path(kind) for kind in (RING, CRASH, STACKS)]
        for before, after in zip(old, new, strict=True):
            with contextlib.suppress(OSError):  # not there, or, on Windows, open
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
        MainThread.look(time.perf_counter_ns())
        now, cpu = time.time_ns(), time.process_time_ns()
        since, used = self._last_beat
        if since and now - since > _SILENT_NS and len(self.silences) < _MOST:
            self.silences.append((since, now, cpu - used))
        self._last_beat = now, cpu
        counts = {name: info.count() for name, info in known_groups().items()}
        # the two innermost frames, and the user's lines
        kept = [at for n, at in enumerate(MainThread.stack) if n < 2 or is_users(at[0].co_filename)]
        self._file.beat({"counts": counts, "stack": marked(kept[:_FRAMES])})

    def _disable(self) -> None:
        """Disable faulthandler; a fork's crash is not this process's."""
        if self._crashes is not None and not self._crashes.closed:
            faulthandler.disable()
            if self._delays_aborts and LIBC is not None:
                LIBC.signal(signal.SIGABRT, None)
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
        if self.collections is not None:
            self.collections.stop()
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


class ExitNotes:
    """Listener for `sys.exit` and `os._exit` of this process."""

    def __init__(self, before_leaving: Callable[[], None]) -> None:
        # last call, with keys "how", "code", "text" and "lines"; the program may have caught the
        # `SystemExit`
        self.last: dict[str, Any] | None = None
        # True once Python's exit handlers have run
        self.ended = False
        # called before `os._exit`, which runs no exit handlers
        self._before_leaving = before_leaving
        self._pid = os.getpid()
        self._theirs: tuple[Any, Any] | None = None

    def start(self) -> None:
        """Listen."""
        self._theirs = sys.exit, os._exit
        sys.exit, os._exit = self._exit, self._leave

    def stop(self) -> None:
        """Undo `start`."""
        if self._theirs is not None:
            if sys.exit == self._exit:
                sys.exit = self._theirs[0]
            if os._exit == self._leave:
                os._exit = self._theirs[1]

    def _exit(self, status: Any = None, /) -> NoReturn:
        self._note("sys.exit", status)
        raise SystemExit(status)

    def _leave(self, status: int) -> NoReturn:
        if os.getpid() == self._pid and not self.ended:
            self._note("os._exit", status)
            self._before_leaving()
        assert self._theirs is not None
        self._theirs[1](status)
        raise SystemExit(status)  # never reached

    def _note(self, how: str, status: Any) -> None:
        if os.getpid() != self._pid:
            return
        code = 0 if status is None else status if isinstance(status, int) else 1
        text = "" if status is None or isinstance(status, int) else str(status)[:_LENGTH]
        lines = read_stack(call_stack(sys._getframe(2)))[:4]
        self.last = {"how": how, "code": int(code), "text": text, "lines": lines}
