"""What a verdict consists of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gradwire.recorder.verdict.dumps import Call


class Kind:
    """What findings are called."""

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
    """One thing that is wrong.

    Attributes:
        kind: See `Kind`.
        ranks: Whose doing it is; empty where the dumps do not show that.
        summary: A sentence.
        details: What shows it, and what came of it; a line each.
        remedy: What to do.
        op, group, number: The collective in which it showed.
        places: Lines of the user's code, "file:line".
        parameters: Of the model.
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
    """What dumps show.

    Attributes:
        findings: The cause first; what else is wrong after it.
        ranks: How many ranks there are, and whose dumps were read.
        notes: What limits the verdict.
    """

    findings: Sequence[Finding]
    world_size: int
    dumps: Sequence[int]
    notes: Sequence[str] = field(default=())

    @property
    def healthy(self) -> bool:
        """Whether nothing failed; a rank may still be slow."""
        calm = (Kind.NOTHING, Kind.SLOW_RANK, Kind.SLOW_TRANSFER)
        return all(finding.kind in calm for finding in self.findings)

    def as_dict(self) -> dict[str, Any]:
        """Of what JSON has."""
        return {
            "findings": [asdict(finding) for finding in self.findings],
            "world_size": self.world_size,
            "dumps": list(self.dumps),
            "notes": list(self.notes),
        }


def list_ranks(ranks: Sequence[int]) -> str:
    """Ranks in words: "rank 1", "ranks 0 and 2", "ranks 0 to 6"."""
    ordered = sorted(ranks)
    if len(ordered) == 1:
        return f"rank {ordered[0]}"
    if len(ordered) > 3 and ordered == list(range(ordered[0], ordered[-1] + 1)):
        return f"ranks {ordered[0]} to {ordered[-1]}"
    return f"ranks {', '.join(map(str, ordered[:-1]))} and {ordered[-1]}"


def place_of(call: Call) -> str:
    """Where it was called: "train.py:25 in step"; "" if that is not known."""
    if not call.filename:
        return ""
    return f"{Path(call.filename).name}:{call.line} in {call.function}"


def name_place(frame: Mapping[str, Any]) -> str:
    """A line in words: "at train.py:25 in step"."""
    return f"at {Path(str(frame['filename'])).name}:{frame['line']} in {frame['name']}"


def name_call(call: Call, *, number: bool = True) -> str:
    """A call in words: "all_reduce of [10] Float (number 5) at train.py:25 in step"."""
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
