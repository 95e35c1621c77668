"""How a member ends: what it tells its supervisor, and its exit code if the run was done before.

Through a pipe that the supervisor makes for each process. Exit codes say too little: a process may
fail after its run is done, and all may fail with the same error at the same step.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any

from gradwire.errors import RunOverError

VARIABLE = "GRADWIRE_ELASTIC_REPORTS"
TEXT = 1000  # characters of an error's message: a pipe takes 4096 bytes at once


class Reports:
    """The supervisor's end of a process's pipe.

    Attributes:
        sender: The descriptor that the process inherits; close it with `started`.
        environment: What tells the process of it.
    """

    def __init__(self) -> None:
        self._receiver, self.sender = os.pipe()
        os.set_blocking(self._receiver, False)
        # the number is another file's in a process that the member starts
        self.environment = {VARIABLE: f"{self.sender}:{os.fstat(self.sender).st_ino}"}

    def started(self) -> None:
        """Leave the sending end to the process."""
        os.close(self.sender)

    def read(self) -> dict[str, Any]:
        """Return all that the process has said, and close the pipe; the process has ended."""
        data = b""
        with contextlib.suppress(BlockingIOError):  # a process that it has forked still lives
            while piece := os.read(self._receiver, 1 << 16):
                data += piece
        os.close(self._receiver)
        said: dict[str, Any] = {}
        for line in data.splitlines():
            said.update(json.loads(line))
        return said


def report(**fields: Any) -> None:
    """Tell the supervisor, if there is one."""
    number, _, inode = os.environ.get(VARIABLE, "").partition(":")
    with contextlib.suppress(OSError, ValueError):
        if os.fstat(int(number)).st_ino == int(inode):
            os.write(int(number), json.dumps(fields).encode() + b"\n")


def end_with_reports(step: Callable[[], int | None]) -> None:
    """Have uncaught errors reported to the supervisor, and a RunOverError end with its exit code.

    Args:
        step: Returns the step that is under way; None if there is none.
    """
    before = getattr(sys.excepthook, "gradwire_before", sys.excepthook)

    def hook(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, RunOverError):
            report(over=str(error))
            print(f"gradwire: {error}", file=sys.stderr, flush=True)
            sys.exit(error.code)  # the interpreter takes it from here
        if isinstance(error, Exception):
            report(error=kind.__name__, message=str(error)[:TEXT], step=step())
        before(kind, error, traceback)

    hook.gradwire_before = before  # type: ignore[attr-defined]
    sys.excepthook = hook
