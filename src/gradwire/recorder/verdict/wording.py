"""Parts of findings: what other ranks had to do with it, and places of the user's own code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gradwire.recorder.verdict.compare import Gap
from gradwire.recorder.verdict.dumps import Dumps, RankDump
from gradwire.recorder.verdict.finding import list_ranks, name_call, name_place


def counts_of(dumps: Dumps, gap: Gap) -> list[str]:
    """How often ranks called what some of them lack: whether one took fewer steps."""
    call = next(iter(gap.calls.values()))
    counts: dict[int, list[int]] = {}
    for rank, dump in dumps.ranks.items():
        times = sum(c.place == call.place for c in dump.calls.get(gap.group, ()))
        counts.setdefault(times, []).append(rank)
    if not call.filename or len(counts) < 2:
        return []
    each = [f"{list_ranks(ranks)} {times} times" for times, ranks in sorted(counts.items())]
    return [f"line {call.line} called it on " + ", on ".join(each)]


def states_of(dumps: Dumps) -> dict[int, str]:
    """What other ranks saw of each process, by the newest dump."""
    states: dict[int, str] = {}
    for dump in sorted(dumps.ranks.values(), key=lambda dump: dump.taken):
        states |= dump.peers
    return states


def consequences(dumps: Dumps, culprits: Sequence[int]) -> list[str]:
    """What other ranks had to do with it."""
    lines = []
    for rank, dump in sorted(dumps.ranks.items()):
        pending = dump.pending
        if rank not in culprits and pending:
            lines.append(f"rank {rank} waited in the {name_call(pending[0])}")
        elif rank not in culprits and dump.events:
            event = dump.events[0]
            lines.append(f"rank {rank} got {event.type}: {shortened(event.message, 120)}")
    return lines[:6] + ([f"… and {len(lines) - 6} more ranks"] if lines[6:] else [])


def last_call(dumps: Dumps, rank: int, group: str | None) -> str:
    """The last collective of a rank, in a group or in any, in words."""
    dump = dumps.ranks.get(rank)
    if dump is None:
        return "no dump of it"
    calls = [c for g, of in dump.calls.items() if group in (None, g) for c in of]
    if not calls:
        return "it called nothing" + (f" on group {group}" if group else "")
    return f"its last was the {name_call(max(calls, key=lambda call: call.created))}"


def at_line(lines: Sequence[dict[str, Any]]) -> str:
    """Where, in words: " at train.py:25 in step"; or nothing."""
    now = innermost(lines)
    return f" at {now.removeprefix('at ')}" if now else ""


def innermost(frames: Sequence[dict[str, Any]]) -> str:
    """The innermost line of the user's own code."""
    for frame in frames:
        if is_users(frame):
            return name_place(frame)
    return ""


def places_of(frames: Sequence[dict[str, Any]]) -> list[str]:
    """The lines of the user's own code, the innermost first."""
    return [f"{f['filename']}:{f['line']}" for f in frames if is_users(f)]


def is_users(frame: Mapping[str, Any]) -> bool:
    """Whether a frame is of the user's own code: as the rank said, or else as its name shows."""
    if "user" in frame:
        return bool(frame["user"])
    parts = ("/site-packages/", "/torch/", "/gradwire/", "/lib/python3", "<frozen", "/bin/")
    return not any(part in str(frame["filename"]) for part in parts)


def last_of(dump: RankDump) -> str:
    """A rank's last error, in words."""
    event = dump.events[-1]
    return f"{event.type}{at_line(event.lines)}: {shortened(' '.join(event.message.split()), 120)}"


def shortened(text: str, length: int) -> str:
    """The beginning of a text."""
    return text if len(text) <= length else text[: length - 1] + "…"
