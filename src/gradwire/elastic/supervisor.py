"""Supervisor of one host: starts members, restarts those that fail, ends them on signals.

A process reports to it through a pipe that the supervisor makes for each process. Exit codes say
too little: a process may fail after its run is done, and all may fail with the same error at the
same step.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch.distributed as dist

from gradwire._processes import end_with_parent, exit_text
from gradwire.elastic.membership import (
    LAUNCH_VARIABLES,
    MEMBERS_VARIABLE,
    STORE_VARIABLE,
    parse_address,
)
from gradwire.errors import ArgumentError, RunOverError, printable, require_linux

VARIABLE = "GRADWIRE_ELASTIC_REPORTS"
TEXT = 1000  # characters of an error's message: a pipe takes 4096 bytes at once


def report(**fields: Any) -> None:
    """Report fields to the supervisor, if there is one."""
    number, _, inode = os.environ.get(VARIABLE, "").partition(":")
    with contextlib.suppress(OSError, ValueError):
        if os.fstat(int(number)).st_ino == int(inode):
            os.write(int(number), json.dumps(fields).encode() + b"\n")


def end_with_reports(
    member: int | None = None, step: Callable[[], int | None] = lambda: None
) -> None:
    """Report uncaught errors to the supervisor; exit with the code of a RunOverError."""
    before = getattr(sys.excepthook, "gradwire_before", sys.excepthook)

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, RunOverError):
            report(over=str(error))
            print(f"gradwire: {error}", file=sys.stderr, flush=True)
            sys.exit(error.code)  # the interpreter handles SystemExit
        if isinstance(error, Exception):
            report(error=kind.__name__, message=str(error)[:TEXT], step=step())
        text = io.StringIO()
        # before `join`, when there is no number, lines get no prefix
        with contextlib.nullcontext() if member is None else contextlib.redirect_stderr(text):
            before(kind, error, trace)
        lines = [f"[member {member}] {printable(line)}\n" for line in text.getvalue().splitlines()]
        sys.stderr.write("".join(lines))  # one write, since members share the terminal
        sys.stderr.flush()

    hook.gradwire_before = before  # type: ignore[attr-defined]
    sys.excepthook = hook


POLL_SECONDS = 0.02
ENDING = tuple(s for s in signal.Signals if s.name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT"))


class _Child:
    """Process of a member, the pipe of its reports, and its place among those of this host."""

    def __init__(self, command: Sequence[str], environment: dict[str, str], place: int) -> None:
        self.place = place
        self.said: dict[str, Any] = {}
        self._receiver, sender = os.pipe()
        os.set_blocking(self._receiver, False)
        # in a process that the member starts, the descriptor may be another file
        environment = {**environment, VARIABLE: f"{sender}:{os.fstat(sender).st_ino}"}
        if environment.get("GRADWIRE_RECORDER", "0") not in ("", "0"):
            environment["RANK"] = str(place)  # names the process's dumps
        try:
            self.process = subprocess.Popen(
                command,
                env=environment,
                pass_fds=[sender],
                # a terminal's signals reach the supervisor only, which forwards them once
                start_new_session=True,
                # the process dies with the supervisor, even if that gets SIGKILL
                preexec_fn=end_with_parent,
            )
        except BaseException:
            os.close(self._receiver)
            raise
        finally:
            os.close(sender)

    def __str__(self) -> str:
        return f"process {self.process.pid}"

    def read(self) -> None:
        """Read all reports, and close the pipe, after the process has ended."""
        data = b""
        with contextlib.suppress(BlockingIOError):  # a child that it forked still has the other end
            while piece := os.read(self._receiver, 1 << 16):
                data += piece
        os.close(self._receiver)
        for line in data.splitlines():
            self.said.update(json.loads(line))

    @property
    def error(self) -> str:
        """The reported error on one line, or the exit code."""
        if "error" not in self.said:
            return f"exit code {self.process.returncode}"
        step = "" if self.said["step"] is None else f" at step {self.said['step']}"
        return printable(f"{self.said['error']}: {self.said['message']}{step}")

    @property
    def end(self) -> str:
        """Description of the end of the process."""
        code = self.process.returncode
        number = f" (member {self.said['member']})" if "member" in self.said else ""
        if code >= 0 and "error" in self.said:
            return f"{self}{number} ended with {self.error} (exit code {code})"
        return f"{self}{number} {exit_text(code)}"


@dataclass
class Supervisor:
    """Processes of one host."""

    command: Sequence[str]
    environment: dict[str, str]
    nproc: int
    restarts: int  # number that is left
    grace: float  # seconds to wait after another process is done; infinite for no limit
    shutdown_timeout: float  # seconds between a signal that ends the processes and SIGKILL
    log: Callable[[str], None]

    def __post_init__(self) -> None:
        self._running: list[_Child] = []
        self._done_at: float | None = None
        self._last_code = 0  # exit code of the process that ended last
        self._failed_code = 0  # exit code of a failure that no other process makes up for
        self._same_errors: list[tuple[str, int | None] | None] = []  # of the last processes
        self._started = 0
        self._gave_up = ""  # why processes are no longer restarted
        self._kill_at: float | None = None
        self.signals: list[int] = []  # received and not handled
        self.stopped_by = 0  # signal that ends all processes; 0 for none

    def run(self) -> int | None:
        """Return the exit code when all processes have ended; None if a signal ended them."""
        for place in range(self.nproc):
            self._start(place)
        self.log(f"started {self._names()}")
        while self._running:
            for child in [c for c in self._running if c.process.poll() is not None]:
                self._running.remove(child)
                self._ended(child)
            while self.signals:
                number = self.signals.pop(0)
                again = number == self.stopped_by == signal.SIGINT
                self.log(f"got {signal.Signals(number).name}; sent it to {self._names()}")
                self._send(signal.SIGKILL if again else number)
                if number in ENDING and not self.stopped_by:
                    self.stopped_by = number
                    self._kill_at = time.monotonic() + self.shutdown_timeout
            self._check_time()
            time.sleep(POLL_SECONDS)
        if self.stopped_by:
            self.log(f"all processes have ended after {signal.Signals(self.stopped_by).name}")
            return None
        code, ended = self._failed_code, "all processes have ended"
        if self._done_at is None:
            code = code or self._last_code
        if code and self._gave_up:
            ended = f"gave up after {_restarts(self._started - self.nproc)}: {self._gave_up}"
        self.log(f"{ended}; exit code {code}")
        return code

    def end(self) -> None:
        """End the remaining processes: SIGTERM first, then SIGKILL after the timeout."""
        self._send(signal.SIGTERM)
        deadline = time.monotonic() + self.shutdown_timeout
        for child in self._running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.process.wait(max(0.0, deadline - time.monotonic()))
        self._send(signal.SIGKILL)
        for child in self._running:
            child.process.wait()
            child.read()
        self._running.clear()

    def _start(self, place: int) -> None:
        self._running.append(_Child(self.command, self.environment, place))
        self._started += 1

    def _ended(self, child: _Child) -> None:
        """Log how a process ended; start another one in its place if that can help."""
        child.read()
        said, code = child.said, child.process.returncode
        self._last_code = code if code >= 0 else 128 - code
        done = bool(said.get("finished", code == 0 and not said))
        if done or (code == 0 and "over" in said):
            self._done_at = self._done_at or time.monotonic()
        if code == 0:
            return
        if self._kill_at is not None:
            self._failed_code = self._failed_code or self._last_code
            self.log(child.end)
        elif done or "over" in said:
            self._failed_code = self._last_code
            self.log(f"{child.end}; not restarted, because the run is done")
        elif self._repeats(child):
            self._failed_code = self._last_code
            self._gave_up = f"every start ended with {child.error}"
            self.log(f"{child.end}; not restarted")
            self._stop()
        elif self.restarts:
            self.restarts -= 1
            self._start(child.place)
            left = _restarts(self.restarts)
            self.log(f"{child.end}; started {self._running[-1]} in its place ({left} left)")
        else:
            self._gave_up = f"the last failure: {child.end}"
            self.log(f"{child.end}; not restarted: no restarts are left")

    def _repeats(self, child: _Child) -> bool:
        """Return True if more than `nproc` processes in a row ended with the same error."""
        # the same error at the same step, or, before `join`, the same exit code
        error: tuple[str, int | None] | None = None
        if "error" in child.said:
            error = (child.said["error"], child.said["step"])
        elif not child.said and child.process.returncode > 0:
            error = (child.error, None)
        if self._same_errors[-1:] != [error]:
            self._same_errors.clear()
        self._same_errors.append(error)
        return error is not None and len(self._same_errors) > self.nproc

    def _stop(self) -> None:
        self._send(signal.SIGTERM)
        self._kill_at = self._kill_at or time.monotonic() + self.shutdown_timeout

    def _check_time(self) -> None:
        """End the processes whose time is over."""
        now, running = time.monotonic(), self._names()
        if not running:
            return
        if self._kill_at is not None:
            if now > self._kill_at:
                self.log(f"killed {running}, after {self.shutdown_timeout:g} s")
                self._send(signal.SIGKILL)
                self._failed_code = self._failed_code or 1
                self._kill_at += self.shutdown_timeout
        elif self._done_at is not None and now - self._done_at > self.grace:
            self.log(f"ended {running}: still running {self.grace:g} s after another is done")
            self._failed_code = self._failed_code or 1
            self._stop()

    def _names(self) -> str:
        return ", ".join(map(str, self._running))

    def _send(self, number: int) -> None:
        for child in self._running:
            child.process.send_signal(number)


def _restarts(number: int) -> str:
    return "1 restart" if number == 1 else f"{number} restarts"


SHUTDOWN_SECONDS = 30.0


def serve_store(host: str = "127.0.0.1", port: int = 0) -> dist.TCPStore:
    """Serve a store in this process, which is not a member.

    Args:
        host: Address to listen on; members on other hosts must be able to reach it.
        port: Port to listen on; 0 for a free one.

    Raises:
        ArgumentError: This host cannot listen there.

    Example:
        >>> store = serve_store()
        >>> store.port > 0
        True
    """
    try:
        listener = socket.create_server((host, port))
    except (OSError, OverflowError) as error:
        raise ArgumentError(
            f"no store can be served at {host}:{port}: {error}; pass an address of this host and a "
            "free port"
        ) from error
    return dist.TCPStore(
        host,
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def supervise(
    command: Sequence[str],
    *,
    nproc: int,
    max_restarts: int = 3,
    store: str | None = None,
    members: int | None = None,
    grace: float | None = None,
    shutdown_timeout: float = SHUTDOWN_SECONDS,
    log: Callable[[str], None] = lambda line: None,
) -> int:
    """Run a command in several processes as members of an elastic run, until all have ended.

    A process that fails or is killed is restarted, unless its run was done. Processes that exit
    with 0 are not restarted, and the others are waited for. If more than `nproc` processes in a row
    end with the same error at the same step, all are ended.

    SIGTERM, SIGINT, SIGHUP and SIGQUIT are forwarded to the processes, which have
    `shutdown_timeout` seconds to end before they are killed; SIGUSR1 and SIGUSR2 are forwarded. No
    process is left when this function returns or raises. Signals are handled only in the main
    thread.

    Args:
        command: Command and its arguments.
        nproc: Number of processes.
        max_restarts: Number of restarts, over all processes.
        store: host:port of a store that another process serves; None to serve one here.
        members: Number of members that the first generation waits for; None for `nproc`.
        grace: Seconds after which processes are ended that still run when another of this host is
            done; None to wait for them.
        shutdown_timeout: Seconds between a signal that ends the processes and SIGKILL.
        log: Function called with a line of text about each death, restart and end.

    Returns:
        0 if the run is done, or the process that ended last exited with 0. Otherwise the exit code
        of a process, 128 + n if signal n killed it; 1 if processes had to be ended. A process that
        fails after its run is done makes it nonzero.

    Raises:
        NotSupportedError: This is not Linux.
        ArgumentError: The command is empty, or an argument is invalid.
        SystemExit: A signal ended the processes, even if they exited with 0; the code is 128 + its
            number.
        KeyboardInterrupt: SIGINT ended the processes.

    Example:
        >>> import sys
        >>> supervise([sys.executable, "-c", "pass"], nproc=2)
        0
        >>> supervise([sys.executable, "-c", "raise SystemExit(7)"], nproc=1, max_restarts=1)
        7
    """
    require_linux("supervise")
    if not command:
        raise ArgumentError("command is empty: pass the program and its arguments")
    members = nproc if members is None else members
    grace = math.inf if grace is None else grace
    for name, value, least in (
        ("nproc", nproc, 1),
        ("max_restarts", max_restarts, 0),
        ("members", members, 1),
        ("grace", grace, 0),
        ("shutdown_timeout", shutdown_timeout, 0),
    ):
        if not value >= least:
            raise ArgumentError(f"{name} is {value}: pass {least} or more")
    if store is None:
        served = serve_store()  # lives until this function returns
        store = f"127.0.0.1:{served.port}"
    parse_address(store, "store")
    environment = {**os.environ, STORE_VARIABLE: store, MEMBERS_VARIABLE: str(members)}
    environment[LAUNCH_VARIABLES[0]] = uuid.uuid4().hex
    supervisor = Supervisor(command, environment, nproc, max_restarts, grace, shutdown_timeout, log)
    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        forwarded = (*ENDING, signal.SIGUSR1, signal.SIGUSR2)
        before = {n: h for n in forwarded if (h := signal.getsignal(n)) != signal.SIG_IGN}
    try:
        for number in before:
            signal.signal(number, lambda number, frame: supervisor.signals.append(number))
        code = supervisor.run()
    finally:
        supervisor.end()
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)
    if code is None:
        if supervisor.stopped_by == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + supervisor.stopped_by)
    return code
