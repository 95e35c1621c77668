"""Dumps of this rank: written on errors, on request and at the end of the process.

A rank that fails writes its dump and leaves a request in the directory. A thread of each rank polls
for requests, so that all ranks write dumps even while their main threads are blocked. Without a
directory, nothing is written and no thread is started.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import multiprocessing
import os
import pickle
import select
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch.distributed as dist

from gradwire._processes import ENDED
from gradwire.errors import ArgumentError, ArgumentTypeError
from gradwire.recorder.crash_files import CrashFiles, ExitNotes
from gradwire.recorder.events import events, on_failure, record_error
from gradwire.recorder.files import FIRST, PREFIX, REQUEST, ErrorRecord
from gradwire.recorder.flight_record import Record, await_gloos_ends, flight_record
from gradwire.recorder.groups import at_end_of_job, not_at_end_of_job, this_rank
from gradwire.recorder.lines import thread_stacks
from gradwire.recorder.processes import (
    Process,
    ask_silent_ranks,
    await_answers,
    family,
    modified,
    processes_in,
)
from gradwire.recorder.recording import not_finite
from gradwire.recorder.tracing import this_clock

OWNER = "GRADWIRE_RECORDEROWNER"
_POLL_SECONDS = 0.2
_FIRST_SECONDS = 0.02  # poll interval until this process has a rank
_REPEAT_NS = 1_000_000_000  # repeated errors write one dump per second
_THREAD = "gradwire-recorder"
_SILENT_SECONDS = 0.7  # after which a rank that has not answered a request is asked by a signal
_TRIES = 3
_BEGAN_NS = time.time_ns()  # approximate start of this process
_parts = itertools.count()
_ASKED = ("request", "SIGUSR2")
_BETWEEN_COLLECTIVES = ("call", "exit")
"""Reasons for a dump outside any collective: every collective that was waited for has ended."""


class BlackBox:
    """Writer of this rank's dumps."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        # absolute: the program may change its directory
        self.directory = Path(directory).absolute()
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._request = self.directory / REQUEST
        self._seen = modified(self._request)
        self._asked = 0.0  # when a request was seen, until silent ranks have been asked
        self._pid = os.getpid()
        self._written = 0
        self._ended, self._ended_ns = False, 0
        self._seen_alive: dict[int, int] = {}  # wall-clock time in ns, by peer
        self._lock = threading.RLock()  # a signal's handler may write while this thread writes
        self._pipe: tuple[int, int] | None = None  # a byte in it ends the thread
        self._signals: tuple[int, int] | None = None
        self._announced: int | None = None
        self._files = CrashFiles(self.directory)
        self._exits = ExitNotes(self._at_exit)
        self._has_first = False
        self._launch: dict[str, str] = {}
        self._launch_before: dict[str, str] = {}  # if the program has changed it
        self._earlier_hook: Callable[..., Any] | None = None

    def start(self) -> None:
        """Start writing dumps on errors, requests, SIGUSR2 and at the end of the process."""
        on_failure.append(self._on_failure)
        self._earlier_hook, sys.excepthook = sys.excepthook, self._on_uncaught
        atexit.register(self._at_exit)
        at_end_of_job(self._at_end_of_job)
        self._exits.start()
        self._take_signal()
        self._files.start()
        self._write_start()
        self._pipe = os.pipe()
        threading.Thread(target=self._watch, name=_THREAD, daemon=True).start()

    def stop(self) -> None:
        """Undo `start`."""
        on_failure.remove(self._on_failure)
        if sys.excepthook == self._on_uncaught:
            sys.excepthook = self._earlier_hook or sys.__excepthook__
        atexit.unregister(self._at_exit)
        not_at_end_of_job(self._at_end_of_job)
        self._exits.stop()
        self._files.stop()
        if os.getpid() != self._pid:
            return  # a fork: the rest belongs to its parent
        if self._signals is not None:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGUSR2, stay_alive)
        assert self._pipe is not None
        os.write(self._pipe[1], b"\0")  # the thread closes both

    def write(self, reason: str, *, first: bool = False) -> Path | None:
        """Write this rank's dump and return its path; None without a rank, or in a fork."""
        rank = _identity()
        if rank is None or os.getpid() != self._pid:
            return None
        self._announce()
        self._write_start()
        if reason in _BETWEEN_COLLECTIVES:
            await_gloos_ends()
        with self._lock:
            record = flight_record()
            # a request during the process's end keeps the reason "exit"
            record["gradwire"] |= self._circumstances(rank, "exit" if self._ended else reason)
            path = self.directory / f"{PREFIX}{rank}"
            # unique even if processes in different containers have the same PID
            content = pickle.dumps(record, protocol=2)
            # `first`: also kept as the dump of the rank's first failure, if it has none yet
            targets = [self.directory / f"{FIRST}{rank}"] if first and not self._has_first else []
            self._has_first |= first
            for target in (*targets, path):
                partial = self.directory / f".{rank}.{os.getpid()}.{next(_parts)}.part"
                try:
                    partial.write_bytes(content)
                    os.replace(partial, target)
                finally:
                    partial.unlink(missing_ok=True)
            self._written = time.perf_counter_ns()
        return path

    def request_all(self, reason: str) -> None:
        """Request dumps from all ranks, which write them within a second."""
        self._request.write_text(reason)
        self._seen, self._asked = modified(self._request), time.monotonic()

    def _circumstances(self, rank: int, reason: str) -> Record:
        files, size, now = self._files, os.environ.get("WORLD_SIZE", ""), time.time_ns()
        peers = {
            process.rank: state
            for process in processes_in(self.directory)
            if process.rank != rank and (state := process.state)
        }
        self._seen_alive |= {peer: now for peer, state in peers.items() if state not in ENDED}
        world_size = int(size) if size.isdecimal() else None
        pauses = files.collections.records if files.collections is not None else []
        return {
            "rank": rank,
            "exit": self._exits.last,
            "ended_ns": self._ended_ns,
            "not_finite": list(not_finite),
            "kernel": family(os.getpid(), files.stacks) if reason in _ASKED else {},
            "pauses": [(each.start, each.end - each.start) for each in pauses],
            "silences": list(files.silences),
            "world_size": dist.get_world_size() if dist.is_initialized() else world_size,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "reason": reason,
            "taken_ns": now,
            "began_ns": _BEGAN_NS,
            "events": [vars(event) for event in list(events)],
            "threads": thread_stacks(without=_THREAD),
            "peers": peers,
            "peers_alive_ns": dict(self._seen_alive),
            "clock": this_clock(),
        }

    def _announce(self) -> None:
        """Write the PID to the directory, so that other ranks can look up this process."""
        rank = _identity()
        if rank is None or rank == self._announced:
            return
        self._announced = rank
        for prefix in (PREFIX, FIRST):  # an earlier run's
            (self.directory / f"{prefix}{rank}").unlink(missing_ok=True)
        self._files.announce(rank)
        text = json.dumps(vars(Process.this(rank)))
        (self.directory / f"process-{rank}.json").write_text(text)

    def _write_start(self) -> None:
        """Write who this process is started as, if a launcher started it as a rank."""
        rank = _launched_rank() if this_rank() is None else None
        if rank is None:
            return
        process = Process.this(rank)
        if process.launch == self._launch:
            return
        # the program may change the launcher's variables until it has a group
        was, self._launch = self._launch, process.launch
        self._launch_before = self._launch_before or was
        notes = f"start-{socket.gethostname()}-"
        for path in self.directory.glob(f"{notes}*.json"):
            # a process in whose place a launcher has started this one
            with contextlib.suppress(OSError, ValueError, TypeError):
                noted = json.loads(path.read_text())
                noted.pop("was", None)
                other = Process(**noted)
                if other.rank == process.rank and other.state in ENDED:
                    path.unlink()
        found = vars(process) | {"was": self._launch_before}
        (self.directory / f"{notes}{os.getpid()}.json").write_text(json.dumps(found))

    # -- when --------------------------------------------------------------------------------

    def _on_failure(self, event: ErrorRecord) -> None:
        if time.perf_counter_ns() - self._written > _REPEAT_NS or event.kind == "uncaught":
            _at_last(lambda: self.write("error", first=True))
        _at_last(lambda: self.request_all(f"error on rank {this_rank()}"))

    def _on_uncaught(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if os.getpid() == self._pid:
            record_error(error.with_traceback(trace), kind="uncaught")
        (self._earlier_hook or sys.__excepthook__)(kind, error, trace)

    def _at_end_of_job(self) -> None:
        _at_last(lambda: self.write("exit"))

    def _at_exit(self) -> None:
        self._ended = self._exits.ended = True
        self._ended_ns = self._ended_ns or time.time_ns()
        self._at_end_of_job()
        if os.getpid() == self._pid and any(event.kind == "uncaught" for event in events):
            _at_last(lambda: await_answers(self.directory, modified(self._request)))
        self._files.forget_crash()

    def _take_signal(self) -> None:
        """Handle SIGUSR2 unless a handler exists; only the main thread may install handlers."""
        if threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGUSR2) not in (signal.SIG_DFL, stay_alive):
            return
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        earlier = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        if earlier != -1:  # an event loop uses the wakeup descriptor
            signal.set_wakeup_fd(earlier)
            os.close(reading)
            os.close(writing)
            return
        self._signals = reading, writing
        # the pipe notifies the thread even while the main thread is blocked
        signal.signal(signal.SIGUSR2, lambda *_: None)

    def _watch(self) -> None:
        """Write a dump whenever one is requested; runs in its own thread."""
        assert self._pipe is not None
        sources = select.poll()  # select.select rejects descriptors from 1,024 on
        for source in (self._pipe[0], *([self._signals[0]] if self._signals else [])):
            sources.register(source, select.POLLIN)
        while True:
            pause = _POLL_SECONDS if self._announced is not None else _FIRST_SECONDS
            readable = [source for source, _ in sources.poll(pause * 1e3)]
            if self._pipe[0] in readable:
                for end in (*self._pipe, *(self._signals or ())):
                    os.close(end)
                return
            signals = os.read(readable[0], 4096) if readable else b""
            with contextlib.suppress(OSError):  # the directory may be removed
                self._announce()
                self._write_start()
                if self._files.is_aborting():
                    _at_last(lambda: self.write("crash"))
                    self._files.end_aborted()
                if not self._ended:
                    _at_last(self._files.beat)
                if signal.SIGUSR2 in signals:
                    self.write("SIGUSR2")
                    self.request_all(f"SIGUSR2 on rank {this_rank()}")
                elif (changed := modified(self._request)) > self._seen:
                    self._seen, self._asked = changed, time.monotonic()
                    self.write("request", first=True)
                elif self._asked and time.monotonic() > self._asked + _SILENT_SECONDS:
                    self._asked = 0.0
                    ask_silent_ranks(self.directory, self._seen)


def stay_alive(number: int, frame: FrameType | None) -> None:
    """Tell how to record, in place of SIGUSR2's default action, which ends a process."""
    message = "gradwire: SIGUSR2 writes dumps if GRADWIRE_RECORDER or recorder.start names a folder"
    print(message, file=sys.stderr)


def _identity() -> int | None:
    """Return this process's rank, before the default group exists the launcher's; or None."""
    rank = this_rank()
    return _launched_rank() if rank is None else rank


def _launched_rank() -> int | None:
    """Return the launcher's RANK; None in child processes of a rank, which inherit it."""
    owned, rank = os.environ.get(OWNER) == str(os.getpid()), os.environ.get("RANK", "")
    return int(rank) if owned and rank.isdecimal() else None


def _at_last(action: Callable[[], object]) -> None:
    """Run an action of error or exit handling, whose own errors must not hide the cause."""
    for _ in range(_TRIES):
        try:
            action()
        except OSError:  # such as a full disk
            return
        except Exception:  # from a signal handler, such as a data loader's for a dead worker
            continue
        return


VARIABLE = "GRADWIRE_RECORDER"
_box: list[BlackBox] = []


def start(directory: str | os.PathLike[str]) -> None:
    """Start writing this rank's dumps on errors, on SIGUSR2 and at the end of the process.

    When a rank fails, all ranks write dumps within a second. The environment variable
    GRADWIRE_RECORDER has the same effect.

    Args:
        directory: Directory that all ranks write to; created if missing. Use a new one per run.

    Raises:
        ArgumentTypeError: `directory` is not a path.
        ArgumentError: The recorder was already started with another directory.

    Example:
        >>> import tempfile
        >>> from gradwire import recorder
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     recorder.start(directory)
        ...     recorder.stop()
    """
    if not isinstance(directory, str | os.PathLike):
        raise ArgumentTypeError(f"directory is {directory!r}: pass a path")
    if _box:
        if _box[0].directory == Path(directory).absolute():
            return
        raise ArgumentError(
            f"directory is {str(directory)!r}, but the recorder writes to "
            f"{str(_box[0].directory)!r} already: call recorder.stop() first"
        )
    if "RANK" in os.environ and multiprocessing.parent_process() is None:
        os.environ.setdefault(OWNER, str(os.getpid()))
    box = BlackBox(directory)
    box.start()
    _box.append(box)


def stop() -> None:
    """Stop writing dumps; collectives are still recorded."""
    while _box:
        _box.pop().stop()


def dump(directory: str | os.PathLike[str] | None = None) -> Path:
    """Write this rank's dump now.

    On Gloo, this waits up to 0.2 s for collectives to end.

    Args:
        directory: Directory of the dump. Default: the directory passed to `start`.

    Returns:
        Path of the dump, `<directory>/rank_<rank>`.

    Raises:
        ArgumentError: No directory was given, or this process has no rank.

    Example:
        >>> import tempfile
        >>> from gradwire import recorder
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     def main():
        ...         torch.distributed.all_reduce(torch.ones(3))
        ...         return recorder.dump(directory).name
        ...     run_ranks(main, world_size=2, backend="shm")
        ['rank_0', 'rank_1']
    """
    if directory is None and not _box:
        raise ArgumentError(
            f"directory is None and the recorder was not started: pass a directory, call "
            f"recorder.start, or set {VARIABLE}"
        )
    box = _box[0] if directory is None else BlackBox(directory)
    path = box.write("call")
    if path is None:
        raise ArgumentError(
            "this process has no rank: call dump() after torch.distributed.init_process_group"
        )
    return path


def start_from_environment() -> None:
    """Start if GRADWIRE_RECORDER contains a directory, and let SIGUSR2 not end the process."""
    main = threading.current_thread() is threading.main_thread()
    if main and signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL:
        signal.signal(signal.SIGUSR2, stay_alive)
    directory = os.environ.get(VARIABLE, "0")
    if directory not in ("", "0") and not _box:
        try:
            start(directory)
        except OSError as error:  # diagnosis must not stop the program
            message = f"{VARIABLE} is {directory!r}, which cannot be written to: {error}"
            warnings.warn(message, RuntimeWarning, stacklevel=2)
