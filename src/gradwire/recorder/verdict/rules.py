"""Rules of the verdict: what each needs, what excludes it, and how sure it is.

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
    innermost,
    last_of,
    list_ranks,
    places_of,
    shortened,
)

CAUSE, ABSENCE = "cause", "absence"


@dataclass(frozen=True)
class Rule:
    """Rule of the verdict.

    Attributes:
        name: Name, shown as `rule` in JSON.
        role: `CAUSE` of a failure, or `ABSENCE` of ranks that others wait for.
        needs: Evidence that it needs.
        unless: Names of rules whose findings exclude it.
        confidence: Confidence of its findings, unless one has its own.
        find: Function that returns its findings.
    """

    name: str
    role: str
    needs: str
    unless: tuple[str, ...]
    confidence: str
    find: Callable[[Evidence], Sequence[Finding]]


RULES = (
    Rule(
        "error",
        CAUSE,
        "an error of a rank that no earlier failure or long wait explains",
        (),
        CERTAIN,
        errors.find_error,
    ),
    Rule(
        "interrupted",
        CAUSE,
        "KeyboardInterrupt on one rank, before any other failure",
        (),
        CERTAIN,
        errors.find_interrupted,
    ),
    Rule(
        "reported",
        CAUSE,
        "an error that a rank reported to the others, and did not end with",
        ("error", "other call", "other value", "crash", "signal", "exit", "stopped", "gone"),
        LIKELY,
        errors.find_reported,
    ),
    Rule(
        "not finite",
        CAUSE,
        "a tensor with NaN or infinity that was about to be sent, if that was checked",
        (),
        CERTAIN,
        errors.find_not_finite,
    ),
    Rule(
        "other call",
        CAUSE,
        "a collective of one number that differs between ranks",
        (),
        CERTAIN,
        errors.find_mismatch,
    ),
    Rule(
        "other value",
        CAUSE,
        "a value that ranks compared and that differs",
        ("other call",),
        CERTAIN,
        errors.find_disagreement,
    ),
    Rule(
        "crash",
        CAUSE,
        "a report of faulthandler",
        (),
        CERTAIN,
        ends.find_crash,
    ),
    Rule(
        "abort",
        CAUSE,
        "a report of faulthandler about an abort in a wait, or outside Python's threads",
        ("crash", "other call", "other value"),
        UNCLEAR,
        ends.find_aborted,
    ),
    Rule(
        "signal",
        CAUSE,
        "an exit by a signal of a rank that ran until the first failure",
        (),
        CERTAIN,
        ends.find_killed,
    ),
    Rule("stopped", CAUSE, "a process in state T", (), CERTAIN, ends.find_stopped),
    Rule(
        "exit",
        CAUSE,
        "an exit by a code or by os._exit before the first failure",
        ("other call",),
        CERTAIN,
        ends.find_exit,
    ),
    Rule(
        "gone",
        CAUSE,
        "one process that ended without a dump before the first failure",
        ("signal", "exit", "crash", "stopped", "error", "other call"),
        LIKELY,
        ends.find_gone,
    ),
    Rule(
        "left",
        CAUSE,
        "a clean end of a rank while a call of its own was running",
        ("error", "other call", "other value", "crash", "signal", "stopped", "exit", "gone"),
        LIKELY,
        ends.find_left,
    ),
    Rule(
        "same rank",
        CAUSE,
        "two processes with one RANK, and no collective",
        (),
        CERTAIN,
        ends.find_same_rank,
    ),
    Rule(
        "other address",
        CAUSE,
        "different values of the launcher's variables, and no collective",
        ("same rank",),
        CERTAIN,
        ends.find_other_values,
    ),
    Rule(
        "never started",
        CAUSE,
        "no process of a rank, and no collective",
        ("same rank", "other address", "error", "exit", "signal", "crash"),
        LIKELY,
        ends.find_never_started,
    ),
    Rule(
        "store",
        CAUSE,
        "rank 0 ended before errors of the store on other ranks",
        ("error", "signal", "exit", "crash"),
        LIKELY,
        ends.find_store_gone,
    ),
    Rule(
        "deadlock",
        CAUSE,
        "a circle of ranks that wait for each other",
        ("error", "other call", "crash", "signal", "exit", "stopped", "gone", "interrupted"),
        CERTAIN,
        waits.find_deadlock,
    ),
    Rule(
        "another wait",
        ABSENCE,
        "a minority in one call, the majority in another",
        ("deadlock",),
        LIKELY,
        waits.find_elsewhere,
    ),
    Rule(
        "missing",
        ABSENCE,
        "a collective in which ranks wait, and ranks that have not called it and do not wait",
        ("another wait", "deadlock"),
        LIKELY,
        waits.find_missing,
    ),
    Rule(
        "not in a group's call",
        ABSENCE,
        "all ranks but one in a call such as new_group",
        ("another wait", "missing"),
        LIKELY,
        waits.find_not_in_group_call,
    ),
    Rule(
        "late",
        ABSENCE,
        "ranks that made a call only after the others had given up",
        ("another wait", "missing", "not in a group's call"),
        LIKELY,
        waits.find_late,
    ),
)


def find_failures(evidence: Evidence) -> list[Finding]:
    """Return the findings about a failure, the cause first; empty if nothing failed."""
    found = {rule.name: _apply(rule, evidence) for rule in RULES}
    kept = {
        rule: found[rule.name]
        for rule in RULES
        if found[rule.name] and not any(found[name] for name in rule.unless)
    }
    causes = [f for rule, of in kept.items() if rule.role == CAUSE for f in of]
    causes.sort(key=lambda finding: finding.time)
    if causes and not causes[0].ranks and causes[0].kind == Kind.MISMATCH:
        # of two ranks that differ, one may say which of its parameters it left out
        causes.sort(key=lambda finding: not (finding.kind == Kind.ERROR and finding.parameters))
    named = {rank for finding in causes for rank in finding.ranks}
    absent = [f for rule, of in kept.items() if rule.role == ABSENCE for f in of]
    late = ("late", "not in a group's call")
    absent = [f for f in absent if not (causes and f.rule in late)]
    known = [*causes, *(f for f in absent if named.isdisjoint(f.ranks))]
    if any(finding.ranks or finding.kind in _SAYS for finding in known):
        return known
    unclear = find_unclear(evidence)
    return [*known, unclear] if unclear else known


_SAYS = (Kind.DIED, Kind.ERROR, Kind.MISMATCH, Kind.START)
"""Kinds that are a verdict without naming a rank."""


def _apply(rule: Rule, evidence: Evidence) -> list[Finding]:
    return [
        replace(f, rule=rule.name, confidence=f.confidence or rule.confidence)
        for f in rule.find(evidence)
    ]


def find_unclear(evidence: Evidence) -> Finding | None:
    """Describe a failure whose cause the dumps do not show."""
    dumps = evidence.dumps
    failed = sorted(rank for rank, dump in dumps.ranks.items() if dump.events)
    stands = [evidence.standing(rank) for rank in dumps.ranks]
    stuck = any(at is not None and at.op in OF_WHOLE_GROUPS for at in stands)
    if not evidence.has_failed() and not stuck:
        return None
    differences = _differences(evidence)
    what = f"{list_ranks(failed)} failed" if failed else "the ranks are stuck"
    places = [
        place for rank in failed for place in places_of(dumps.ranks[rank].events[-1].lines)[:1]
    ]
    return Finding(
        Kind.MISMATCH if differences else Kind.UNCLEAR,
        (),
        differences or f"{what}, and the recorded data does not show which rank caused it",
        _where_all_were(evidence, failed),
        (
            "look at the first error in the ranks' logs",
            "run it again on shm, which records where each call begins and ends",
        ),
        places=tuple(dict.fromkeys(places[:3])),
        rule="unclear",
        confidence=UNCLEAR,
    )


def _where_all_were(evidence: Evidence, failed: Sequence[int]) -> tuple[str, ...]:
    """Describe where each rank was."""
    dumps = evidence.dumps
    details = [f"rank {rank}: {last_of(dumps.ranks[rank])}" for rank in failed]
    for rank in sorted({*dumps.world} - {*failed}):
        at = evidence.standing(rank)
        where = innermost(dumps.ranks[rank].stack) if rank in dumps.ranks else ""
        code = dumps.exits[rank].code if rank in dumps.exits else 0
        if at is not None:
            details.append(f"rank {rank} waited {at.words}")
        elif where and dumps.ranks[rank].reason != "exit":
            details.append(f"rank {rank} was {where}")
        elif code:
            details.append(f"rank {rank} ended with exit code {code}")
        elif rank in dumps.ranks:
            details.append(f"rank {rank} ended without an error")
        else:
            details.append(f"rank {rank} left no dump")
    return (*details[:8], *([f"… and {len(details) - 8} more"] if details[8:] else []))


def _differences(evidence: Evidence) -> str:
    """Return the ranks' comparison of their calls if all of them failed with a mismatch."""
    last = [dump.events[-1] for dump in evidence.dumps.ranks.values() if dump.events]
    if not last or any(event.type != "MismatchError" for event in last):
        return ""
    return shortened(" ".join(last[0].message.split()), 600)
