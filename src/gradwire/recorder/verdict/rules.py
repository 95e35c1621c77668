"""Rules of the verdict: what each finds, and how sure it is.

Each rule of `CAUSES` yields at most one finding, with the time when its ranks departed from what
the others did. The verdict is the surest, and of these the oldest; a finding that is not certain
may be a consequence of one that is. If there is no cause, ranks wait: then the first rule of
`WAITS` that finds something is the verdict.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from gradwire.recorder.verdict import ends, errors, waits
from gradwire.recorder.verdict.dumps import Dumps, read_dumps
from gradwire.recorder.verdict.evidence import (
    CERTAIN,
    LIKELY,
    NEVER,
    OF_WHOLE_GROUPS,
    UNCLEAR,
    Evidence,
    Finding,
    Kind,
    Verdict,
    at_line,
    by_ranks,
    list_ranks,
    name_line,
    place_of,
    swallowing_handler,
    unique,
    were,
)
from gradwire.recorder.verdict.slow import find_slow

_Find = Callable[[Evidence], Finding | None]

# each function's docstring says what evidence it needs; its finding is certain, unless it says so
CAUSES: dict[str, _Find] = {
    "error": errors.find_error,
    "not finite": errors.find_not_finite,
    "mismatch": errors.find_mismatch,
    "end": ends.find_end,
    "stopped": ends.find_stopped,
    "start": ends.find_start,
}
WAITS: dict[str, _Find] = {
    "deadlock": waits.find_deadlock,
    "another wait": waits.find_elsewhere,
    "missing": waits.find_missing,
}

_SAYS = (Kind.DEADLOCK, Kind.DIED, Kind.ERROR, Kind.MISMATCH, Kind.NOTHING, Kind.START)
"""Kinds that are a verdict without naming a rank."""
_SPREADS = (Kind.CRASHED, Kind.DIED, Kind.ERROR, Kind.FINISHED, Kind.NOT_FINITE, Kind.STOPPED)
"""Kinds whose consequences on the other ranks are told."""
_LEFT_OUT = (Kind.FINISHED, Kind.MISSING, Kind.MISMATCH, Kind.SKIPPED)
"""Kinds that a swallowed error, or another line before, may explain."""


_LEAST_FREE = 1 << 20  # bytes on the disk with the dumps


def explain(directory: Path, prefix: str | None = None, *, live: bool = False) -> Verdict:
    """Return the verdict on a directory of dumps.

    Args:
        directory: Directory that ranks wrote to; dumps of torch's flight recorder work too.
        prefix: Prefix of file names. Default: the most common one.
        live: True if the ranks run: those that have not waited for a second are no failure.

    Raises:
        ArgumentError: The directory has no dumps, or none in torch's format.
    """
    dumps = read_dumps(directory, prefix)
    evidence = Evidence(dumps, live=live)
    if live and evidence.makes_progress():
        text = "the ranks run, and none has waited for another for more than a second"
        calls = by_ranks({rank: evidence.last_call(rank) for rank in dumps.ranks})
        findings = [Finding(Kind.NOTHING, (), text, details=calls)]
    else:
        findings = find_failures(evidence) or find_slow(dumps)
    if not findings:
        count = sum(len(of) for dump in dumps.ranks.values() for of in dump.calls.values())
        text = f"nothing failed, and no rank was late for long ({count} calls)"
        findings = [Finding(Kind.NOTHING, (), text)]
    hosts = {start.rank: (start.pid, start.host) for start in dumps.starts}
    hosts |= {rank: (dump.pid, dump.host) for rank, dump in dumps.ranks.items() if dump.pid}
    processes = {rank: f"pid {pid} on {host or 'this host'}" for rank, (pid, host) in hosts.items()}
    return Verdict(
        findings, len(dumps.world), sorted(dumps.ranks), _notes(dumps, directory), processes
    )


def _notes(dumps: Dumps, directory: Path) -> list[str]:
    notes = []
    missing = [rank for rank in dumps.world if rank not in {*dumps.ranks, *dumps.damaged}]
    if dumps.damaged:
        notes.append(f"the dumps of {list_ranks(dumps.damaged)} cannot be read")
    if missing:
        full = shutil.disk_usage(directory).free < _LEAST_FREE
        text = ": the disk with the records is full" if full else ""
        notes.append(f"no dump of {list_ranks(missing)}{text}")
    if all(not dump.reason for dump in dumps.ranks.values()):
        notes.append(
            "dumps of torch's own recorder: they lack stacks of waiting ranks and end times"
        )
    return notes


def find_failures(evidence: Evidence) -> list[Finding]:
    """Return the findings about a failure, the cause first; empty if nothing failed."""
    causes = _apply(CAUSES, evidence)
    causes.sort(key=lambda each: ([CERTAIN, LIKELY, UNCLEAR].index(each.confidence), each.time))
    if causes and causes[0].confidence == CERTAIN:
        causes = [finding for finding in causes if finding.confidence == CERTAIN]
    if causes and not causes[0].ranks and causes[0].kind == Kind.MISMATCH:
        # of two ranks that differ, one may say which of its parameters it left out
        causes.sort(key=lambda finding: not (finding.kind == Kind.ERROR and finding.parameters))
    found = causes or _apply(WAITS, evidence)[:1]
    if not any(finding.ranks or finding.kind in _SAYS for finding in found[:1]):
        unclear = _find_unclear(evidence)
        found += [unclear] if unclear else []
    return [_with_circumstances(found[0], evidence), *found[1:]] if found else []


def _apply(rules: Mapping[str, _Find], evidence: Evidence) -> list[Finding]:
    return [
        replace(
            finding,
            ranks=tuple(finding.ranks),
            rule=name,
            confidence=finding.confidence or (CERTAIN if finding.ranks else UNCLEAR),
        )
        for name, find in rules.items()
        if (finding := find(evidence))
    ]


def _with_circumstances(finding: Finding, evidence: Evidence) -> Finding:
    """Add what happened to the others, where the ranks first differed, and swallowed errors."""
    details, places, remedies = [*finding.details], [*finding.places], finding.remedies
    if finding.ranks and finding.kind in _SPREADS:
        details += evidence.consequences(finding.ranks)
    if finding.ranks and finding.kind in _LEFT_OUT:
        found = evidence.first_other_line(finding.ranks)
        if found is not None and found[0].place not in places:
            mine, theirs = found
            text = f"already in {mine.op} number {mine.number}, {were(finding.ranks)} at "
            text += f"{name_line(mine.frame)}, and the others were at {name_line(theirs.frame)}"
            details.insert(0, text)
            places = [mine.place, theirs.place, *places]
        handler = swallowing_handler(finding.places[-1]) if finding.places[1:] else None
        if handler is not None and finding.kind != Kind.MISSING:
            file, _, line = finding.places[-1].rpartition(":")
            details.insert(
                0, f"the `except` in line {handler} may swallow an error and skip {line}"
            )
            text = (
                f"print the error in the `except` in line {handler} of {file}, and raise it again"
            )
            remedies = (text, *remedies)[:3]
    return replace(finding, details=details, places=unique(places), remedies=remedies)


def _find_unclear(evidence: Evidence) -> Finding | None:
    """Describe a failure whose cause the dumps do not show."""
    dumps = evidence.dumps
    failed = sorted(rank for rank, dump in dumps.ranks.items() if dump.events)
    stuck = any(at is not None and at.op in OF_WHOLE_GROUPS for at in evidence.standings.values())
    codes = any(exit_.code for exit_ in dumps.exits.values())
    if not (failed or stuck or codes or evidence.gaps):
        return None
    if failed and {*failed} == {*evidence.interrupted}:
        text = "the program was interrupted, and no rank had failed or waited for another for long"
        where = _where_all_were(evidence, failed)
        return Finding(Kind.NOTHING, (), text, (), where, rule="unclear", confidence=LIKELY)
    what = f"{list_ranks(failed)} failed" if failed else "the ranks wait for each other"
    summary = f"{what}, and the recorded data does not show which rank caused it"
    last = [dumps.ranks[rank].events[-1] for rank in failed]
    compared = bool(last) and all(event.type == "MismatchError" for event in last)
    # C++ code of torch raises a plain error on all ranks in one line when it compares their models
    alike = {(event.type, event.call, str(event.lines[:1])) for event in last}
    all_failed = len(failed) == len(dumps.world) > 1 and evidence.gave_up == NEVER
    compared |= all_failed and len(alike) == 1 and not last[0].call
    return Finding(
        Kind.MISMATCH if compared else Kind.UNCLEAR,
        (),
        last[0].text() if compared else summary,
        ("look at the first error in the ranks' logs",),
        _where_all_were(evidence, failed),
        unique([place for event in last for place in place_of(event.lines)][:3]),
        rule="unclear",
        confidence=UNCLEAR,
    )


def _where_all_were(evidence: Evidence, failed: Sequence[int]) -> list[str]:
    dumps, texts = evidence.dumps, dict[int, str]()
    for rank in dumps.world:
        at = evidence.standing(rank)
        where = at_line(dumps.ranks[rank].stack) if rank in dumps.ranks else ""
        if rank in failed:
            texts[rank] = evidence.last_error(rank)
        elif at is not None:
            texts[rank] = f"waited {at.words}"
        elif where and not evidence.ended(rank):
            texts[rank] = f"was{where}"
        else:
            texts[rank] = evidence.last_call(rank)
    return by_ranks(texts)
