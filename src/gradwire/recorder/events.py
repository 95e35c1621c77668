"""What went wrong in this process, in order: the errors that a verdict begins with."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch.distributed import ProcessGroup

from gradwire.errors import GradwireError, MismatchError
from gradwire.recorder.groups import GroupInfo, info_of
from gradwire.recorder.lines import Line, Place, call_stack, read_stack
from gradwire.recorder.origins import (
    called_by_user,
    came_from_loading,
    came_from_waiting,
    causes_of,
    trace_of,
)
from gradwire.recorder.recording import ERROR, GROUP, Entry

_KEPT = 32
_NOTED = "_gradwire_noted"  # on the error: another may get its address when it is gone


@dataclass
class Event:
    """An error of this rank.

    Attributes:
        kind: "error", or "uncaught" if it ends the process.
        type, message: The error's.
        parameters: Of the model, which the error names.
        time: When; of CLOCK_MONOTONIC, in ns.
        lines: Where; the user's own code first.
        chain: The types of the errors that it was raised from, or while they were handled.
        waited: Whether it, or one of the chain, came out of a call that waits for other ranks.
        call: What of torch.distributed the user's line had called; "" if nothing.
        values: Of ranks that disagree: what each has, by rank.
        own: Whether it came out of code that waits for no other rank, wherever that was called.
    """

    kind: str
    type: str
    message: str
    parameters: tuple[str, ...]
    time: int
    lines: list[Line] = field(default_factory=list)
    chain: list[str] = field(default_factory=list)
    waited: bool = False
    call: str = ""
    values: dict[int, str] = field(default_factory=dict)
    own: bool = False

    def as_dict(self) -> dict[str, Any]:
        """Of plain containers and scalars."""
        return dict(vars(self), parameters=list(self.parameters))


events: deque[Event] = deque(maxlen=_KEPT)
on_failure: list[Callable[[Event], None]] = []
"""Called after an error was noted; see `black_box`."""


def failed(
    error: BaseException,
    entry: Entry | None = None,
    *,
    kind: str = "error",
    group: ProcessGroup | None = None,
) -> None:
    """Note an error; whatever it is, nothing is raised here.

    An error that passes several places that note it is noted once, and again where it ends the
    process.

    Args:
        error: The error.
        entry: The collective that it ended.
        kind: "uncaught" where it ends the process.
        group: The group in which ranks disagree, if there is no entry.
    """
    if entry is not None:
        entry[ERROR] = f"{type(error).__name__}: {error}"
    if vars(error).get(_NOTED) == kind:
        return
    vars(error)[_NOTED] = kind
    trace = trace_of(error)
    places: list[Place] = trace[::-1]
    if kind != "uncaught":
        places += call_stack(sys._getframe(1))
    chain = list(causes_of(error))
    event = Event(
        kind,
        type(error).__name__,
        _message(error),
        tuple(getattr(error, "parameters", ())) if isinstance(error, GradwireError) else (),
        time.perf_counter_ns(),
        read_stack(places)[:8],
        [type(each).__name__ for each in chain],
        any(map(came_from_waiting, [error, *chain])),
        called_by_user(places),
        _values_by_rank(error, entry[GROUP].find_name() if entry else info_of(group)),
        came_from_loading(error),
    )
    events.append(event)
    for listener in on_failure:
        listener(event)


def _message(error: BaseException) -> str:
    try:
        return str(error)[:4000]
    except Exception as other:
        return f"(its message cannot be read: {type(other).__name__})"


def _values_by_rank(error: BaseException, info: GroupInfo | None) -> dict[int, str]:
    """What each rank has, of ranks that disagree."""
    values = getattr(error, "values", ())
    if not isinstance(error, MismatchError) or info is None or len(values) != len(info.ranks):
        return {}
    return dict(zip(info.ranks, values, strict=True))
