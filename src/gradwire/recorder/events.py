"""What went wrong in this process, in order: the errors that a verdict begins with."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from gradwire.recorder.lines import Line, Place, call_stack, read_stack
from gradwire.recorder.recording import ERROR, Entry

__all__ = ["Event", "events", "failed", "on_failure"]

_KEPT = 32


@dataclass
class Event:
    """An error of this rank.

    Attributes:
        kind: "error", or "uncaught" if it ends the process.
        type, message: The error's.
        parameters: Of the model, which the error names.
        time: When; of CLOCK_MONOTONIC, in ns.
        lines: Where; the user's own code first.
    """

    kind: str
    type: str
    message: str
    parameters: tuple[str, ...]
    time: int
    lines: list[Line] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Of plain containers and scalars."""
        return dict(vars(self), parameters=list(self.parameters))


events: deque[Event] = deque(maxlen=_KEPT)
on_failure: list[Callable[[Event], None]] = []
"""Called after an error was noted; see `black_box`."""
_last = threading.local()


def failed(error: BaseException, entry: Entry | None = None, *, kind: str = "error") -> None:
    """Note an error; whatever it is, nothing is raised here.

    An error that passes several places that note it is noted once, and again where it ends the
    process.

    Args:
        error: The error.
        entry: The collective that it ended.
        kind: "uncaught" where it ends the process.
    """
    if entry is not None:
        entry[ERROR] = f"{type(error).__name__}: {error}"
    if getattr(_last, "noted", None) == (id(error), kind):
        return
    _last.noted = (id(error), kind)
    trace = [(f.f_code, f.f_lasti) for f, _ in traceback.walk_tb(error.__traceback__)]
    places: list[Place] = trace[::-1]
    if kind != "uncaught":
        places += call_stack(sys._getframe(1))
    event = Event(
        kind,
        type(error).__name__,
        str(error)[:4000],
        tuple(getattr(error, "parameters", ())),
        time.perf_counter_ns(),
        read_stack(places)[:8],
    )
    events.append(event)
    for listener in on_failure:
        listener(event)
