"""Findings and verdicts, and descriptions of ranks, lines and calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gradwire.recorder.verdict.dumps import Call


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
    SKIPPED = "skipped"
    SLOW_RANK = "slow rank"
    SLOW_TRANSFER = "slow transfer"
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
        remedy: Advice in the imperative.
        op, group, number: Collective in which it appeared.
        places: Lines of the user's code, as "file:line".
        parameters: Model parameters.
    """

    kind: str
    ranks: tuple[int, ...]
    summary: str
    details: tuple[str, ...] = ()
    remedy: str = ""
    op: str = ""
    group: str = ""
    number: int = 0
    places: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()


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
            "findings": [asdict(finding) for finding in self.findings],
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
