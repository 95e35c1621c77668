"""Position of each rank: in a call that waits for other ranks, or in its own code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gradwire.recorder.verdict.dumps import Dumps, Event, RankDump
from gradwire.recorder.verdict.finding import name_call, name_place
from gradwire.recorder.verdict.wording import is_users

_SECONDARY = {  # errors caused by other ranks' failures
    "BrokenGroupError",
    "CheckedMismatchError",
    "CollectiveTimeoutError",
    "DistBackendError",
    "DistNetworkError",
    "DistStoreError",
    "KeyboardInterrupt",
    "MismatchError",  # the recorded calls show more
    "PeerFailedError",
    "PeerLostError",
    "SIGTERMException",
}
OF_WHOLE_GROUPS = {"barrier", "init_process_group", "monitored_barrier", "new_group"}
"""Calls that end once all ranks have made them, and that may be missing from the records."""
_OF_HANDLES = {"result", "synchronize", "value", "wait", "wait_all"}
"""Methods that end an earlier call, which may be a message."""
_STANDARD = ("/lib/python3", "<frozen ")
_COMMUNICATION = ("/torch/distributed/", "/gradwire/", "gradwire_autoload.py")


@dataclass(frozen=True)
class Standing:
    """Call in which a rank waits, or waited until it failed.

    Attributes:
        op: Name of the operation; "" if unknown, such as for the wait of a handle.
            filename, line: Line of the call.
        words: Description of the call.
        peer: Rank whose message it waits for; None for a call of a whole group.
    """

    op: str
    filename: str
    line: int
    words: str
    peer: int | None = None


def standing_of(dumps: Dumps, rank: int) -> Standing | None:
    """Return the call in which a rank waits for others; None if it does not wait, or is unknown."""
    dump = dumps.ranks.get(rank)
    if dump is None:
        return None
    if dump.pending:
        call = dump.pending[0]
        return Standing(call.op, call.filename, call.line, f"in the {name_call(call)}")
    for of, message in dumps.messages:
        if of == rank and message["state"] != "completed" and message["op"] == "recv":
            frame = message["frames"][0]
            words = f"for a message from rank {message['peer']} {name_place(frame)}"
            return Standing("recv", *_at(frame), words, int(message["peer"]))
    return _failed_in(dump) or (None if dump.reason == "exit" else _stands_in(dump.stack))


def _failed_in(dump: RankDump) -> Standing | None:
    """Return the call in which a rank waited when its last error was raised."""
    if not dump.events or is_primary(dump.events[-1], dump):
        return None
    event = dump.events[-1]
    if was_interrupted(event) or not event.lines:
        return None
    return _standing("" if event.call in _OF_HANDLES else event.call, event.lines[0])


def _stands_in(stack: Sequence[Mapping[str, Any]]) -> Standing | None:
    if not waits_for_others(stack):
        return None
    called = ""
    for frame in stack:
        if is_users(frame):
            return _standing(called, frame)
        if any(part in str(frame["filename"]) for part in _COMMUNICATION):
            called = str(frame["name"]) if frame["name"] != "wrapper" else called
    return None


def waits_for_others(stack: Sequence[Mapping[str, Any]]) -> bool:
    """Return True if the innermost code of a stack communicates."""
    for frame in stack:
        filename = str(frame["filename"])
        if is_users(frame):
            return False
        if "/site-packages/" in filename or not any(part in filename for part in _STANDARD):
            return any(part in filename for part in _COMMUNICATION)
    return False


def _standing(op: str, frame: Mapping[str, Any]) -> Standing:
    return Standing(op, *_at(frame), f"in {op or 'a call'} {name_place(frame)}")


def _at(frame: Mapping[str, Any]) -> tuple[str, int]:
    return str(frame["filename"]), int(frame["line"])


def was_interrupted(event: Event) -> bool:
    """Return True if a rank was interrupted in its own code, not in a wait for others."""
    return event.type == "KeyboardInterrupt" and not event.call and not event.waited


def is_primary(event: Event, dump: RankDump) -> bool:
    """Return True if no other rank's failure explains an error."""
    if event.waited or not _SECONDARY.isdisjoint((event.type, *event.chain)):
        return False
    if event.own or "RuntimeError" not in (event.type, *event.chain):
        return True
    # Gloo raises plain RuntimeErrors; in backward, only the pending calls tell them apart
    waits_at = {call.place for call in dump.pending}
    return waits_at.isdisjoint(_at(line) for line in event.lines)
