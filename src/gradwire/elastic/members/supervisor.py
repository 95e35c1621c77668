"""Start the processes of one host, restart those that fail, and end them on signals."""

from __future__ import annotations

import contextlib
import math
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gradwire._processes import end_with_parent
from gradwire._text import printable
from gradwire.elastic.members.reports import Reports

POLL_SECONDS = 0.02
WAIT_SECONDS = 60.0  # until a message says that processes still run after the run
ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
RECORDER_VARIABLE = "GRADWIRE_RECORDER"


@dataclass(frozen=True)
class _Member:
    """Process of a member, its pipe, and its place among the processes of this host."""

    process: subprocess.Popen[bytes]
    reports: Reports
    place: int

    def __str__(self) -> str:
        return f"process {self.process.pid}"


class Supervisor:
    """Processes of one host; arguments as for `supervise`.

    Attributes:
        signals: Signals that this process received and has not handled.
        stopped_by: Signal that ends all processes; 0 for none.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: dict[str, str],
        nproc: int,
        restarts: int,
        grace: float | None,
        shutdown_timeout: float,
        log: Callable[[str], None],
    ) -> None:
        self._command, self._environment, self._nproc = command, environment, nproc
        self._restarts, self._grace, self._shutdown_timeout = restarts, grace, shutdown_timeout
        self._log = log
        self._running: list[_Member] = []
        self._done_at: float | None = None
        self._patience = WAIT_SECONDS if grace is None else grace
        self._last_code = 0  # exit code of the process that ended last
        self._failed_code = 0  # exit code of a failure that no other process makes up for
        self._same_errors: list[tuple[str, int | None]] = []
        self._started = 0
        self._gave_up = ""  # why processes are no longer restarted
        self._kill_at: float | None = None
        self.signals: list[int] = []
        self.stopped_by = 0

    def run(self) -> int | None:
        """Return the exit code when all processes have ended; None if a signal ended them."""
        self._running += [self._start(place) for place in range(self._nproc)]
        self._log(f"started {self._names()}")
        while self._running:
            for member in [m for m in self._running if m.process.poll() is not None]:
                self._running.remove(member)
                self._ended(member)
            while self.signals:
                self._take_signal(self.signals.pop(0))
            self._check_time()
            time.sleep(POLL_SECONDS)
        if self.stopped_by:
            self._log(f"all processes have ended after {_name(self.stopped_by)}")
            return None
        code = self._failed_code or (self._last_code if self._done_at is None else 0)
        if code and self._gave_up:
            restarts = _restarts(self._started - self._nproc)
            self._log(f"gave up after {restarts}: {self._gave_up}; exit code {code}")
        else:
            self._log(f"all processes have ended; exit code {code}")
        return code

    def end(self) -> None:
        """End the remaining processes: SIGTERM first, then SIGKILL after the timeout."""
        self._send(signal.SIGTERM)
        deadline = time.monotonic() + self._shutdown_timeout
        for member in self._running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                member.process.wait(max(0.0, deadline - time.monotonic()))
        self._send(signal.SIGKILL)
        for member in self._running:
            member.process.wait()
            member.reports.read()
        self._running.clear()

    def _start(self, place: int) -> _Member:
        reports = Reports()
        environment = {**self._environment, **reports.environment}
        if environment.get(RECORDER_VARIABLE, "0") not in ("", "0"):
            environment["RANK"] = str(place)  # names the process's dumps
        try:
            process = subprocess.Popen(
                self._command,
                env=environment,
                pass_fds=[reports.sender],
                # a terminal's signals reach the supervisor only, which forwards them once
                start_new_session=True,
                # the process dies with the supervisor, even if that gets SIGKILL
                preexec_fn=end_with_parent,
            )
        except BaseException:
            reports.started()
            reports.read()
            raise
        reports.started()
        self._started += 1
        return _Member(process, reports, place)

    def _ended(self, member: _Member) -> None:
        """Log how a process ended; start another one in its place if that can help."""
        said, code = member.reports.read(), member.process.returncode
        self._last_code = code if code >= 0 else 128 - code
        done = bool(said.get("finished", code == 0 and not said))
        if done or (code == 0 and "over" in said):
            self._done_at = self._done_at or time.monotonic()
        if code == 0:
            return
        how = _how(member, said)
        if self._kill_at is not None:
            self._failed_code = self._failed_code or self._last_code
            self._log(how)
        elif done or "over" in said:
            self._failed_code = self._last_code
            self._log(f"{how}; not restarted, because the run is done")
        elif self._repeats(code, said):
            self._failed_code = self._last_code
            self._gave_up = f"every start ended with {_error(code, said)}"
            self._log(f"{how}; not restarted")
            self._stop()
        elif self._restarts:
            self._restarts -= 1
            self._running.append(self._start(member.place))
            left = _restarts(self._restarts)
            self._log(f"{how}; started {self._running[-1]} in its place ({left} left)")
        else:
            self._gave_up = f"the last failure: {how}"
            self._log(f"{how}; not restarted: no restarts are left")

    def _repeats(self, code: int, said: dict[str, Any]) -> bool:
        """Return True if more than `nproc` processes in a row ended with the same error.

        That is the same error at the same step, or, before `join`, the same exit code.
        """
        if "error" in said:
            error = (said["error"], said["step"])
        elif not said and code > 0:
            error = (f"exit code {code}", None)
        else:
            self._same_errors.clear()
            return False
        if self._same_errors[-1:] != [error]:
            self._same_errors.clear()
        self._same_errors.append(error)
        return len(self._same_errors) > self._nproc

    def _take_signal(self, number: int) -> None:
        again = number == self.stopped_by == signal.SIGINT
        self._log(f"got {_name(number)}; sent it to {self._names()}")
        self._send(signal.SIGKILL if again else number)
        if number in ENDING and not self.stopped_by:
            self.stopped_by = number
            self._kill_at = time.monotonic() + self._shutdown_timeout

    def _stop(self) -> None:
        self._send(signal.SIGTERM)
        self._kill_at = self._kill_at or time.monotonic() + self._shutdown_timeout

    def _check_time(self) -> None:
        """End the processes whose time is over."""
        now, running = time.monotonic(), self._names()
        if not running:
            return
        if self._kill_at is not None:
            if now > self._kill_at:
                self._log(f"killed {running}, after {self._shutdown_timeout:g} s")
                self._send(signal.SIGKILL)
                self._failed_code = self._failed_code or 1
                self._kill_at += self._shutdown_timeout
        elif self._done_at is not None and now - self._done_at > self._patience:
            if self._grace is None:
                self._log(f"waiting for {running}, after another is done; --grace ends them")
                self._patience = math.inf
            else:
                self._log(f"ended {running}: still running {self._grace:g} s after another is done")
                self._failed_code = self._failed_code or 1
                self._stop()

    def _names(self) -> str:
        return ", ".join(map(str, self._running))

    def _send(self, number: int) -> None:
        for member in self._running:
            member.process.send_signal(number)


def _how(member: _Member, said: dict[str, Any]) -> str:
    code = member.process.returncode
    number = f" (member {said['member']})" if "member" in said else ""
    if code < 0:
        return f"{member}{number} was killed by {_name(-code)}"
    ended = f"{member}{number} ended with {_error(code, said)}"
    return f"{ended} (exit code {code})" if "error" in said else ended


def _error(code: int, said: dict[str, Any]) -> str:
    """Return the reported error on one line, or the exit code."""
    if "error" not in said:
        return f"exit code {code}"
    step = "" if said["step"] is None else f" at step {said['step']}"
    return printable(f"{said['error']}: {said['message']}{step}")


def _restarts(number: int) -> str:
    return "1 restart" if number == 1 else f"{number} restarts"


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"
