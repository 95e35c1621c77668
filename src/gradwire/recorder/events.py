"""Errors of this process in order, from which a verdict starts."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from gradwire.errors import GradwireError, MismatchError, PeerFailedError
from gradwire.recorder.groups import GroupInfo, info_of
from gradwire.recorder.lines import Line, Location, call_stack, read_stack
from gradwire.recorder.origins import (
    called_by_user,
    came_from_loading,
    came_from_waiting,
    causes_of,
    raised_in_python,
    trace_of,
)
from gradwire.recorder.recording import ERROR, GROUP, Entry

_KEPT = 32
_NOTED = "_gradwire_noted"  # attribute of the error: IDs are reused after deletion


@dataclass
class Event:
    """Error of this rank.

    Attributes:
        kind: "error", or "uncaught" if the error ends the process.
        type, message: Type name and message of the error.
        parameters: Model parameters that the error names.
        time: Time of the error on CLOCK_MONOTONIC, in ns.
        lines: Stack of the error, the user's own code first.
        chain: Type names of its causes and contexts.
        waited: True if the error, or one of the chain, was raised by a call that waits for ranks.
        call: Function of torch.distributed that the user's line called; "" if none.
        values: Value of each rank, by rank, if ranks disagree.
        own: True if the error was raised by code that never waits for other ranks.
        reported: Ranks that reported an error to this one, if the error says so.
        raised: True if a `raise` statement of Python raised the error, and each of its chain.
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
    raised: bool = False
    reported: tuple[int, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return a dict of plain containers and scalars."""
        lists = {name: list(getattr(self, name)) for name in ("parameters", "reported")}
        return dict(vars(self), **lists)


events: deque[Event] = deque(maxlen=_KEPT)
on_failure: list[Callable[[Event], None]] = []
"""Functions called with each recorded error; see `black_box`."""


def record_error(
    error: BaseException,
    entry: Entry | None = None,
    *,
    kind: str = "error",
    group: ProcessGroup | None = None,
) -> None:
    """Record an error; never raises.

    An error that is passed several times is recorded once, and once more if it ends the process.

    Args:
        error: Error to record.
        entry: Collective that failed with it.
        kind: "uncaught" if the error ends the process.
        group: Group in which ranks disagree, if there is no entry.
    """
    if entry is not None:
        entry[ERROR] = f"{type(error).__name__}: {error}"
    if vars(error).get(_NOTED) == kind:
        return
    vars(error)[_NOTED] = kind
    trace = trace_of(error)
    locations: list[Location] = trace[::-1]
    if kind != "uncaught":
        locations += call_stack(sys._getframe(1))
    chain = list(causes_of(error))
    event = Event(
        kind,
        type(error).__name__,
        _message(error),
        tuple(getattr(error, "parameters", ())) if isinstance(error, GradwireError) else (),
        time.perf_counter_ns(),
        read_stack(locations)[:8],
        [type(each).__name__ for each in chain],
        any(map(came_from_waiting, [error, *chain])),
        called_by_user(locations),
        _values_by_rank(error, entry[GROUP].find_name() if entry else info_of(group)),
        came_from_loading(error),
        all(map(raised_in_python, [error, *chain])),
        _reported(error, info_of(group)),
    )
    events.append(event)
    for listener in on_failure:
        listener(event)


def _message(error: BaseException) -> str:
    try:
        return str(error)[:4000]
    except Exception as other:
        return f"(str() of this error raised {type(other).__name__})"


def _reported(error: BaseException, info: GroupInfo | None) -> tuple[int, ...]:
    """Return the global ranks that reported an error, which the others then raise."""
    if not isinstance(error, PeerFailedError) or info is None:
        return ()
    return tuple(info.ranks[rank] for rank in error.ranks if rank < len(info.ranks))


def _values_by_rank(error: BaseException, info: GroupInfo | None) -> dict[int, str]:
    """Return each rank's value if the error says that ranks disagree."""
    values = getattr(error, "values", ())
    world = info_of(dist.group.WORLD) if info is None and dist.is_initialized() else None
    info = info or world
    if not isinstance(error, MismatchError) or info is None or len(values) != len(info.ranks):
        return {}
    return dict(zip(info.ranks, values, strict=True))
