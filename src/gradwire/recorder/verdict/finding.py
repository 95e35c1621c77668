"""Findings and verdicts, and descriptions of ranks, lines and calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gradwire.recorder.verdict.dumps import Call, Dumps, RankDump


class Kind:
    """Kinds of findings."""

    CRASHED = "crashed"
    DEADLOCK = "deadlock"
    DIED = "died"
    ERROR = "error"
    FINISHED = "finished early"
    MISMATCH = "mismatch"
    MISSING = "missing"
    NOTHING = "nothing"
    NOT_FINITE = "not finite"
    SKIPPED = "skipped"
    SLOW_RANK = "slow rank"
    SLOW_TRANSFER = "slow transfer"
    START = "start-up"
    STOPPED = "stopped"
    UNCLEAR = "unclear"


@dataclass(frozen=True)
class Finding:
    """One problem.

    Attributes:
        kind: One of `Kind`.
        ranks: Ranks that caused it; empty if the dumps do not show them.
        summary: Description in one sentence.
        details: Evidence and consequences, one per line.
        remedies: At most three things to do, in the imperative.
        op, group, number: Collective in which it appeared.
        places: Lines of the user's code, as "file:line".
        parameters: Model parameters.
        time: Time when the ranks departed from what the others did, in ns; 0 if unknown.
        rule: Name of the rule that found it.
        confidence: One of `CERTAIN`, `LIKELY` and `UNCLEAR`.
    """

    kind: str
    ranks: tuple[int, ...]
    summary: str
    details: tuple[str, ...] = ()
    remedies: tuple[str, ...] = ()
    op: str = ""
    group: str = ""
    number: int = 0
    places: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()
    time: int = 0
    rule: str = ""
    confidence: str = ""

    @property
    def remedy(self) -> str:
        """All remedies, as one text."""
        return "; ".join(self.remedies)


CERTAIN, LIKELY, UNCLEAR = "certain", "likely", "unclear"


@dataclass(frozen=True)
class Verdict:
    """Verdict on a directory of dumps.

    Attributes:
        findings: Findings, the cause first.
        world_size: Number of ranks.
        dumps: Ranks whose dumps were read.
        notes: Limits of the verdict.
    """

    findings: Sequence[Finding]
    world_size: int
    dumps: Sequence[int]
    notes: Sequence[str] = field(default=())

    @property
    def healthy(self) -> bool:
        """True if nothing failed; a rank may still be slow."""
        calm = (Kind.NOTHING, Kind.SLOW_RANK, Kind.SLOW_TRANSFER)
        return all(finding.kind in calm for finding in self.findings)

    def as_dict(self) -> dict[str, Any]:
        """Return a dict that JSON can represent."""
        return {
            "findings": [asdict(f) | {"remedy": f.remedy} for f in self.findings],
            "world_size": self.world_size,
            "dumps": list(self.dumps),
            "notes": list(self.notes),
        }


def list_ranks(ranks: Sequence[int]) -> str:
    """Describe ranks: "rank 1", "ranks 0 and 2", "ranks 0 to 6"."""
    ordered = sorted(ranks)
    if len(ordered) == 1:
        return f"rank {ordered[0]}"
    if len(ordered) > 3 and ordered == list(range(ordered[0], ordered[-1] + 1)):
        return f"ranks {ordered[0]} to {ordered[-1]}"
    return f"ranks {', '.join(map(str, ordered[:-1]))} and {ordered[-1]}"


def place_of(call: Call) -> str:
    """Describe the line of a call: "train.py:25 in step"; "" if unknown."""
    if not call.filename:
        return ""
    return f"{Path(call.filename).name}:{call.line} in {call.function}"


def name_place(frame: Mapping[str, Any]) -> str:
    """Describe a line: "at train.py:25 in step"."""
    return f"at {Path(str(frame['filename'])).name}:{frame['line']} in {frame['name']}"


def name_call(call: Call, *, number: bool = True) -> str:
    """Describe a call: "all_reduce of [10] Float (number 5) at train.py:25 in step"."""
    text = call.op
    if call.sizes:
        sizes = ", ".join(str(list(size)) for size in call.sizes[:3])
        text += f" of {sizes}{', …' if call.sizes[3:] else ''} {' '.join(call.dtypes)}"
    if number:
        text += f" (number {call.number})"
    if call.parameters:
        more = f", … ({len(call.parameters)})" if call.parameters[3:] else ""
        text += f" for {', '.join(call.parameters[:3])}{more}"
    return f"{text} at {place_of(call)}" if call.filename else text


def last_call(dumps: Dumps, rank: int, group: str | None) -> str:
    """Describe a rank's last collective, in one group or in any."""
    dump, trace = dumps.ranks.get(rank), dumps.traces.get(rank)
    if dump is None and trace is not None and (trace.calls or any(trace.counts.values())):
        if trace.calls:
            last = trace.calls[-1]
            open_ = "" if last["end"] else ", which had not ended"
            at = name_place(last["line"]) if last["line"] else ""
            return f"its last call was {last['op']} (number {last['number']}) {at}{open_}"
        counts = ", ".join(f"{n} on group {name}" for name, n in sorted(trace.counts.items()))
        return f"it had made at least {counts} calls"
    if dump is None:
        return "no dump"
    calls = [c for g, of in dump.calls.items() if group in (None, g) for c in of]
    if not calls:
        return "it called nothing" + (f" on group {group}" if group else "")
    return f"its last call was the {name_call(max(calls, key=lambda call: call.created))}"


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


def on_host(dumps: Dumps, ranks: Sequence[int]) -> str:
    """Describe the host of ranks, if the dumps are of several hosts: " on node-2"."""
    hosts = {dump.host for dump in dumps.ranks.values() if dump.host}
    own = {dumps.ranks[rank].host for rank in ranks if rank in dumps.ranks}
    return f" on {', '.join(sorted(own))}" if len(hosts) > 1 and own else ""


def at_line(lines: Sequence[Mapping[str, Any]]) -> str:
    """Describe the innermost line: " at train.py:25 in step"; "" if there is none."""
    now = innermost(lines)
    return f" at {now.removeprefix('at ')}" if now else ""


def innermost(frames: Sequence[Mapping[str, Any]]) -> str:
    """Describe the innermost line of the user's own code."""
    for frame in frames:
        if is_users(frame):
            return name_place(frame)
    return ""


def places_of(frames: Sequence[Mapping[str, Any]]) -> list[str]:
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
    return f"{event.type}{at_line(event.lines)}: {shortened(' '.join(event.message.split()), 300)}"


def shortened(text: str, length: int) -> str:
    """Shorten a text in its middle, since messages begin with what and end with why."""
    if len(text) <= length:
        return text
    return f"{text[: length * 2 // 3]} … {text[-length // 3 :]}"
