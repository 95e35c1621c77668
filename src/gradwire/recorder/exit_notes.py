"""Notes on how this process ends by its own will: `sys.exit` and `os._exit`, with code and line."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn

from gradwire.recorder.lines import call_stack, read_stack

_LENGTH = 500


class ExitNotes:
    """Listener for `sys.exit` and `os._exit` of this process.

    Args:
        before_leaving: Function called before `os._exit`, which runs no exit handlers.

    Attributes:
        last: Last call: keys "how", "code", "text", "time" (wall clock, ns) and "lines"; or None.
            The program may have caught the `SystemExit`.
        ended: True once Python's exit handlers have run.
    """

    def __init__(self, before_leaving: Callable[[], None]) -> None:
        self.last: dict[str, Any] | None = None
        self.ended = False
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
        self.last = {"how": how, "code": int(code), "text": text, "time": time.time_ns()}
        self.last["lines"] = lines
