"""Dumps of this rank: written on errors, on request and at the end of the process.

A rank that fails writes its dump and leaves a request in the directory. A thread of each rank polls
for requests, so that all ranks write dumps even while their main threads are blocked. Without a
directory, nothing is written and no thread is started.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import itertools
import json
import multiprocessing
import os
import pickle
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed as dist

from gradwire._processes import ENDED
from gradwire.errors import ArgumentError, ArgumentTypeError
from gradwire.recorder.crash_files import CrashFiles, ExitNotes
from gradwire.recorder.events import events, on_failure, record_error
from gradwire.recorder.files import PREFIX, REQUEST, ErrorRecord
from gradwire.recorder.flight_record import Record, await_gloos_ends, flight_record
from gradwire.recorder.groups import at_end_of_job, not_at_end_of_job, this_rank
from gradwire.recorder.lines import Location, MainThread, main_stack, marked, users_line
from gradwire.recorder.processes import (
    Process,
    ask_silent_ranks,
    await_answers,
    describe,
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
_parts = itertools.count()
_FULL = (errno.ENOSPC, errno.EDQUOT)
_MOMENTS = 8
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
        self._stopped = threading.Event()
        self._announced: int | None = None
        self._files = CrashFiles(self.directory)
        self._exits = ExitNotes(self._at_exit)
        # where the main thread was at requests, and what the kernel showed of it at the last beat
        self._moments: list[Record] = []
        self._kernel: Record = {}
        self._spare: list[int] = []  # descriptor that is closed to write when files are exhausted
        self._process: Process | None = None
        self._earlier_hook: Callable[..., Any] | None = None
        self._hook_of_threads: Callable[..., Any] | None = None

    def start(self) -> None:
        """Start writing dumps on errors, requests and at the end of the process."""
        on_failure.append(self._on_failure)
        self._earlier_hook, sys.excepthook = sys.excepthook, self._on_uncaught
        self._hook_of_threads, threading.excepthook = threading.excepthook, self._on_thread_error
        atexit.register(self._at_exit)
        at_end_of_job(self._at_end_of_job)
        self._exits.start()
        self._files.start()
        self._announce()
        self._spare.append(os.open(os.devnull, os.O_RDONLY))
        threading.Thread(target=self._watch, name=_THREAD, daemon=True).start()

    def stop(self) -> None:
        """Undo `start`."""
        on_failure.remove(self._on_failure)
        if sys.excepthook == self._on_uncaught:
            sys.excepthook = self._earlier_hook or sys.__excepthook__
        if threading.excepthook == self._on_thread_error:
            threading.excepthook = self._hook_of_threads or threading.__excepthook__
        atexit.unregister(self._at_exit)
        not_at_end_of_job(self._at_end_of_job)
        self._exits.stop()
        self._files.stop()
        if os.getpid() != self._pid:
            return  # a fork: the rest belongs to its parent
        self._stopped.set()
        os.close(self._spare.pop())

    def write(self, reason: str) -> Path | None:
        """Write this rank's dump and return its path; None without a rank, or in a fork."""
        rank = _identity()
        if rank is None or os.getpid() != self._pid:
            return None
        self._announce()
        if reason in _BETWEEN_COLLECTIVES:
            await_gloos_ends()
        with self._lock:
            record = flight_record()
            # a request during the process's end keeps the reason "exit"
            record["gradwire"] |= self._circumstances(rank, "exit" if self._ended else reason)
            path = self.directory / f"{PREFIX}{rank}"
            # unique even if processes in different containers have the same PID
            partial = self.directory / f".{rank}.{os.getpid()}.{next(_parts)}.part"
            try:
                partial.write_bytes(pickle.dumps(record, protocol=2))
                os.replace(partial, path)
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
            if process.rank != rank and (state := process.state) not in ("", "unknown")
        }
        self._seen_alive |= {peer: now for peer, state in peers.items() if state not in ENDED}
        world_size = int(size) if size.isdecimal() else None
        pauses = files.collections.records if files.collections is not None else []
        return {
            "rank": rank,
            "exit": self._exits.last,
            "ended_ns": self._ended_ns,
            "not_finite": list(not_finite),
            "moments": list(self._moments),
            "pauses": [(each.start, each.end - each.start) for each in pauses],
            "silences": list(files.silences),
            "world_size": dist.get_world_size() if dist.is_initialized() else world_size,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "reason": reason,
            "taken_ns": now,
            "since_ns": now - time.perf_counter_ns() + MainThread.since,
            "events": [vars(event) for event in list(events)],
            "threads": {"MainThread": marked(main_stack())},
            "peers": peers,
            "peers_alive_ns": dict(self._seen_alive),
            "clock": this_clock(),
        }

    def _announce(self) -> None:
        """Write who this process is, so that others can look it up, and see how it was started."""
        rank = _identity()
        if rank is None or (rank == self._announced and this_rank() is not None):
            return
        process = Process.this(rank)
        if process == self._process:
            return
        self._process = process  # whose variables the program may change until it has a group
        if rank != self._announced:
            self._announced = rank
            (self.directory / f"{PREFIX}{rank}").unlink(missing_ok=True)  # an earlier run's
            self._files.announce(rank)
        for other in processes_in(self.directory):
            if other.rank == rank and other.state in ENDED:  # this one was started in its place
                other.file(self.directory).unlink(missing_ok=True)
        process.file(self.directory).write_text(json.dumps(vars(process)))

    # -- when --------------------------------------------------------------------------------

    def _on_failure(self, event: ErrorRecord) -> None:
        self._note_moment(MainThread.stack, self._kernel)
        if time.perf_counter_ns() - self._written > _REPEAT_NS or event.kind == "uncaught":
            self._at_last(lambda: self.write("error"))
        self._at_last(lambda: self.request_all(f"error on rank {this_rank()}"))

    def _on_uncaught(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if os.getpid() == self._pid:
            record_error(error.with_traceback(trace), kind="uncaught")
        (self._earlier_hook or sys.__excepthook__)(kind, error, trace)

    def _on_thread_error(self, error: threading.ExceptHookArgs) -> None:
        if os.getpid() == self._pid and error.exc_value is not None:
            record_error(error.exc_value, kind="thread")
        (self._hook_of_threads or threading.__excepthook__)(error)

    def _at_end_of_job(self) -> None:
        self._at_last(lambda: self.write("exit"))

    def _at_exit(self) -> None:
        self._ended = self._exits.ended = True
        self._ended_ns = self._ended_ns or time.time_ns()
        self._at_end_of_job()
        if os.getpid() == self._pid and any(event.kind == "uncaught" for event in events):
            self._at_last(lambda: await_answers(self.directory, modified(self._request)))
        self._files.forget_crash()

    def _watch(self) -> None:
        """Write a dump whenever one is requested; runs in its own thread."""
        while True:
            pause = _POLL_SECONDS if self._announced is not None else _FIRST_SECONDS
            if self._stopped.wait(pause):
                return
            with contextlib.suppress(OSError):  # the directory may be removed
                self._announce()
                if self._files.is_aborting():
                    self._at_last(lambda: self.write("crash"))
                    self._files.end_aborted()
                changed = modified(self._request)
                if not self._ended:
                    self._beat(changed > self._seen)
                if changed > self._seen:
                    self._seen, self._asked = changed, time.monotonic()
                    self._at_last(lambda: self.write("request"))
                elif self._asked and time.monotonic() > self._asked + _SILENT_SECONDS:
                    self._asked = 0.0
                    ask_silent_ranks(self.directory, self._seen)

    def _beat(self, asked: bool) -> None:
        """Write that Python runs; for a request, note where the main thread was when it came."""
        before, pid = MainThread.stack, os.getpid()
        self._files.beat()
        stays = users_line(before) == users_line(MainThread.stack)
        if asked:
            # it may have gone on since: another rank's failure has released what it waited for
            kernel = family(pid, self._files.stacks) if stays else self._kernel
            self._note_moment(before, kernel)
        self._kernel = describe(pid) if stays else {}

    def _note_moment(self, stack: Sequence[Location], kernel: Record) -> None:
        moment = {"time": time.time_ns(), "stack": marked(stack), "kernel": kernel}
        self._moments = [*self._moments, moment][-_MOMENTS:]

    def _at_last(self, action: Callable[[], object]) -> None:
        """Run an action of error or exit handling, whose own errors must not hide the cause."""
        with contextlib.suppress(OSError, IndexError):
            os.close(self._spare.pop())  # another thread may have done so
        for _ in range(_TRIES):
            try:
                action()
            except OSError as error:
                if error.errno in _FULL:
                    text = f"gradwire cannot write records to {self.directory}: {error.strerror}"
                    print(text, file=sys.stderr)
            except Exception:  # from a signal handler, such as a data loader's for a dead worker
                continue
            break
        with contextlib.suppress(OSError):
            self._spare.append(os.open(os.devnull, os.O_RDONLY))


def _identity() -> int | None:
    """Return this process's rank, before the default group exists the launcher's; or None."""
    rank = this_rank()
    return _launched_rank() if rank is None else rank


def _launched_rank() -> int | None:
    """Return the launcher's RANK; None in child processes of a rank, which inherit it."""
    owned, rank = os.environ.get(OWNER) == str(os.getpid()), os.environ.get("RANK", "")
    return int(rank) if owned and rank.isdecimal() else None


VARIABLE = "GRADWIRE_RECORDER"
_box: list[BlackBox] = []


def start(directory: str | os.PathLike[str]) -> None:
    """Start writing this rank's dumps on errors, on request and at the end of the process.

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
    """Start if GRADWIRE_RECORDER contains a directory."""
    directory = os.environ.get(VARIABLE, "0")
    if directory not in ("", "0") and not _box:
        try:
            start(directory)
        except OSError as error:  # diagnosis must not stop the program
            message = f"{VARIABLE} is {directory!r}, which cannot be written to: {error}"
            warnings.warn(message, RuntimeWarning, stacklevel=2)
