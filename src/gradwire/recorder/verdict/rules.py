"""Rules of the verdict: what each finds, what excludes it, and how sure it is.

The order of the table has no meaning. A rule that is not excluded yields findings, each with the
time when its ranks departed from what the others did. Among the findings of causes, the oldest is
the verdict. Findings about ranks that merely did not come are considered if there is no cause.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from gradwire.recorder.verdict import ends, errors, waits
from gradwire.recorder.verdict.evidence import (
    CERTAIN,
    LIKELY,
    OF_WHOLE_GROUPS,
    UNCLEAR,
    Evidence,
    Finding,
    Kind,
    at_line,
    list_ranks,
    place_of,
    unique,
)


@dataclass(frozen=True)
class Rule:
    """Rule of the verdict."""

    # shown as `rule` in JSON
    name: str
    # returns its finding; its docstring says what evidence it needs
    find: Callable[[Evidence], Finding | None]
    # of the finding, unless it has its own or names no rank
    confidence: str
    # names of rules whose findings exclude it
    unless: tuple[str, ...] = ()


_ENDS = ("crash", "signal", "exit")
_FAILURES = ("error", "other call", *_ENDS, "stopped", "gone")
_STARTED = ("same rank", "other address", "error", *_ENDS)
_MISSING = ("another wait", "missing")

CAUSES = (
    Rule("error", errors.find_error, CERTAIN),
    Rule("interrupted", errors.find_interrupted, CERTAIN),
    Rule("reported", errors.find_reported, LIKELY, (*_FAILURES, "other value")),
    Rule("not finite", errors.find_not_finite, CERTAIN),
    Rule("other call", errors.find_mismatch, CERTAIN),
    Rule("other value", errors.find_disagreement, CERTAIN, ("other call",)),
    Rule("crash", ends.find_crash, CERTAIN),
    Rule("abort", ends.find_aborted, UNCLEAR, ("crash", "other call", "other value")),
    Rule("signal", ends.find_killed, CERTAIN),
    Rule("stopped", ends.find_stopped, CERTAIN),
    Rule("exit", ends.find_exit, CERTAIN, ("other call",)),
    Rule("gone", ends.find_gone, LIKELY, ("error", "other call", *_ENDS, "stopped")),
    Rule("left", ends.find_left, LIKELY, (*_FAILURES, "other value")),
    Rule("same rank", ends.find_same_rank, CERTAIN),
    Rule("other address", ends.find_other_values, CERTAIN, ("same rank",)),
    Rule("never started", ends.find_never_started, LIKELY, _STARTED),
    Rule("store", ends.find_store_gone, LIKELY, ("error", *_ENDS)),
    Rule("deadlock", waits.find_deadlock, CERTAIN, (*_FAILURES, "interrupted")),
)
ABSENCES = (
    Rule("another wait", waits.find_elsewhere, LIKELY, ("deadlock",)),
    Rule("missing", waits.find_missing, LIKELY, ("another wait", "deadlock")),
    Rule("not in a group's call", waits.find_not_in_group_call, LIKELY, _MISSING),
    Rule("late", waits.find_late, LIKELY, (*_MISSING, "not in a group's call")),
)

_SAYS = (Kind.DIED, Kind.ERROR, Kind.MISMATCH, Kind.START)
"""Kinds that are a verdict without naming a rank."""
_SPREADS = (Kind.CRASHED, Kind.DIED, Kind.ERROR, Kind.FINISHED, Kind.NOT_FINITE, Kind.STOPPED)
"""Kinds whose consequences on the other ranks are told."""


def find_failures(evidence: Evidence) -> list[Finding]:
    """Return the findings about a failure, the cause first; empty if nothing failed."""
    found = {rule.name: rule.find(evidence) for rule in (*CAUSES, *ABSENCES)}

    def kept(rules: Sequence[Rule]) -> list[Finding]:
        return [
            replace(
                f,
                ranks=tuple(f.ranks),
                rule=rule.name,
                confidence=f.confidence or (rule.confidence if f.ranks else UNCLEAR),
            )
            for rule in rules
            if (f := found[rule.name]) and not any(found[name] for name in rule.unless)
        ]

    causes = sorted(kept(CAUSES), key=lambda finding: finding.time)
    if causes and not causes[0].ranks and causes[0].kind == Kind.MISMATCH:
        # of two ranks that differ, one may say which of its parameters it left out
        causes.sort(key=lambda finding: not (finding.kind == Kind.ERROR and finding.parameters))
    causes = [
        replace(f, details=(*f.details, *evidence.consequences(f.ranks)))
        if f.ranks and f.kind in _SPREADS
        else f
        for f in causes
    ]
    named = {rank for finding in causes for rank in finding.ranks}
    late = ("late", "not in a group's call") if causes else ()
    absent = [f for f in kept(ABSENCES) if f.rule not in late and named.isdisjoint(f.ranks)]
    known = [*causes, *absent]
    if any(finding.ranks or finding.kind in _SAYS for finding in known):
        return known
    unclear = _find_unclear(evidence)
    return [*known, unclear] if unclear else known


def _find_unclear(evidence: Evidence) -> Finding | None:
    """Describe a failure whose cause the dumps do not show."""
    dumps = evidence.dumps
    failed = sorted(rank for rank, dump in dumps.ranks.items() if dump.events)
    stuck = any(at is not None and at.op in OF_WHOLE_GROUPS for at in evidence.standings.values())
    codes = any(exit_.code for exit_ in dumps.exits.values())
    if not (failed or stuck or codes or evidence.gaps):
        return None
    what = f"{list_ranks(failed)} failed" if failed else "the ranks are stuck"
    summary = f"{what}, and the recorded data does not show which rank caused it"
    last = [dumps.ranks[rank].events[-1] for rank in failed]
    compared = bool(last) and all(event.type == "MismatchError" for event in last)
    return Finding(
        Kind.MISMATCH if compared else Kind.UNCLEAR,
        (),
        last[0].text() if compared else summary,
        (
            "look at the first error in the ranks' logs",
            "run it again on shm, which records where each call begins and ends",
        ),
        _where_all_were(evidence, failed),
        unique([place for event in last for place in place_of(event.lines)][:3]),
        rule="unclear",
        confidence=UNCLEAR,
    )


def _where_all_were(evidence: Evidence, failed: Sequence[int]) -> list[str]:
    dumps = evidence.dumps
    details = [f"rank {rank}: {evidence.last_error(rank)}" for rank in failed]
    for rank in sorted({*dumps.world} - {*failed}):
        at = evidence.standing(rank)
        where = at_line(dumps.ranks[rank].stack) if rank in dumps.ranks else ""
        if at is not None:
            details.append(f"rank {rank} waited {at.words}")
        elif where and not evidence.ended(rank):
            details.append(f"rank {rank} was{where}")
        else:
            details.append(evidence.last_call(rank))
    return details[:8] + ([f"… and {len(details) - 8} more"] if details[8:] else [])
