"""Reports of a process to its supervisor, and the exit code of a process that comes too late.

They go through a pipe that the supervisor makes for each process. Exit codes say too little: a
process may fail after its run is done, and all may fail with the same error at the same step.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

from gradwire._text import printable
from gradwire.errors import RunOverError

VARIABLE = "GRADWIRE_ELASTIC_REPORTS"
TEXT = 1000  # characters of an error's message: a pipe takes 4096 bytes at once


class Reports:
    """Supervisor's end of the pipe of a process.

    Attributes:
        sender: Descriptor that the process inherits; close it with `started`.
        environment: Variable through which the process finds the pipe.
    """

    def __init__(self) -> None:
        self._receiver, self.sender = os.pipe()
        os.set_blocking(self._receiver, False)
        # in a process that the member starts, the descriptor may be another file
        self.environment = {VARIABLE: f"{self.sender}:{os.fstat(self.sender).st_ino}"}

    def started(self) -> None:
        """Close the sending end in the supervisor, once the process is started."""
        os.close(self.sender)

    def read(self) -> dict[str, Any]:
        """Return all reports, and close the pipe, after the process has ended."""
        data = b""
        with contextlib.suppress(BlockingIOError):  # a child that it forked still has the other end
            while piece := os.read(self._receiver, 1 << 16):
                data += piece
        os.close(self._receiver)
        said: dict[str, Any] = {}
        for line in data.splitlines():
            said.update(json.loads(line))
        return said


def report(**fields: Any) -> None:
    """Report fields to the supervisor, if there is one."""
    number, _, inode = os.environ.get(VARIABLE, "").partition(":")
    with contextlib.suppress(OSError, ValueError):
        if os.fstat(int(number)).st_ino == int(inode):
            os.write(int(number), json.dumps(fields).encode() + b"\n")


def end_with_reports(
    member: int | None = None, step: Callable[[], int | None] = lambda: None
) -> None:
    """Report uncaught errors to the supervisor; exit with the code of a RunOverError.

    The lines of their tracebacks begin with the member's number.

    Args:
        member: Number of this member; None before it has joined.
        step: Function that returns the current step; None if there is none.
    """
    before = getattr(sys.excepthook, "gradwire_before", sys.excepthook)

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, RunOverError):
            report(over=str(error))
            print(f"gradwire: {error}", file=sys.stderr, flush=True)
            sys.exit(error.code)  # the interpreter handles SystemExit
        if isinstance(error, Exception):
            report(error=kind.__name__, message=str(error)[:TEXT], step=step())
        with contextlib.nullcontext() if member is None else _numbered_lines(member):
            before(kind, error, trace)

    hook.gradwire_before = before  # type: ignore[attr-defined]
    sys.excepthook = hook


@contextlib.contextmanager
def _numbered_lines(member: int) -> Iterator[None]:
    """Begin each line that is written to stderr inside the block with the member's number."""
    text = io.StringIO()
    try:
        with contextlib.redirect_stderr(text):
            yield
    finally:
        lines = text.getvalue().splitlines()
        numbered = (f"[member {member}] {printable(line)}\n" for line in lines)
        sys.stderr.write("".join(numbered))  # one write, since members share the terminal
        sys.stderr.flush()
