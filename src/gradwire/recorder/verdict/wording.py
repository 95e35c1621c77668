"""Text of findings: consequences on other ranks, last calls, and lines of the user's code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gradwire.recorder.verdict.compare import Gap
from gradwire.recorder.verdict.dumps import Dumps, RankDump
from gradwire.recorder.verdict.finding import list_ranks, name_call, name_place


def counts_of(dumps: Dumps, gap: Gap) -> list[str]:
    """Count each rank's calls of the line of a gap, which shows whether a rank took fewer steps."""
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
    """Return the newest state of each process, as other ranks recorded it."""
    states: dict[int, str] = {}
    for dump in sorted(dumps.ranks.values(), key=lambda dump: dump.taken):
        states |= dump.peers
    return states


def consequences(dumps: Dumps, culprits: Sequence[int]) -> list[str]:
    """Describe the consequences on other ranks."""
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
    """Describe a rank's last collective, in one group or in any."""
    dump = dumps.ranks.get(rank)
    if dump is None:
        return "no dump"
    calls = [c for g, of in dump.calls.items() if group in (None, g) for c in of]
    if not calls:
        return "it called nothing" + (f" on group {group}" if group else "")
    return f"its last call was the {name_call(max(calls, key=lambda call: call.created))}"


def at_line(lines: Sequence[dict[str, Any]]) -> str:
    """Describe the innermost line: " at train.py:25 in step"; "" if there is none."""
    now = innermost(lines)
    return f" at {now.removeprefix('at ')}" if now else ""


def innermost(frames: Sequence[dict[str, Any]]) -> str:
    """Describe the innermost line of the user's own code."""
    for frame in frames:
        if is_users(frame):
            return name_place(frame)
    return ""


def places_of(frames: Sequence[dict[str, Any]]) -> list[str]:
    """Return the lines of the user's own code, innermost first."""
    return [f"{f['filename']}:{f['line']}" for f in frames if is_users(f)]


def is_users(frame: Mapping[str, Any]) -> bool:
    """Return True if a frame is in the user's own code, as recorded or else by its file name."""
    if "user" in frame:
        return bool(frame["user"])
    parts = ("/site-packages/", "/torch/", "/gradwire/", "/lib/python3", "<frozen", "/bin/")
    return not any(part in str(frame["filename"]) for part in parts)


def last_of(dump: RankDump) -> str:
    """Describe a rank's last error."""
    event = dump.events[-1]
    return f"{event.type}{at_line(event.lines)}: {shortened(' '.join(event.message.split()), 120)}"


def shortened(text: str, length: int) -> str:
    """Shorten a text to a length."""
    return text if len(text) <= length else text[: length - 1] + "…"
