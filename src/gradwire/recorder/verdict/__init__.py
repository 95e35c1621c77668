"""The verdict: from a directory of dumps to the rank and the cause.

What is looked for, in this order: ranks that called different things, or an error that nothing else
explains, whichever came first; a process that crashed, was killed or stopped; ranks that wait for
each other; a rank that is missing. If nothing failed: who was slow.
"""

from __future__ import annotations

from pathlib import Path

from gradwire.recorder.verdict.absent import (
    find_deadlock,
    find_elsewhere,
    find_late,
    find_missing,
    find_not_in_group_call,
)
from gradwire.recorder.verdict.compare import find_gaps, find_mismatch
from gradwire.recorder.verdict.deaths import find_crash, find_ended, find_killed
from gradwire.recorder.verdict.dumps import Dumps
from gradwire.recorder.verdict.errors import find_disagreement, find_error, find_unclear
from gradwire.recorder.verdict.finding import Finding, Kind, Verdict
from gradwire.recorder.verdict.reading import read_dumps
from gradwire.recorder.verdict.slow import find_slow

__all__ = ["Finding", "Kind", "Verdict", "explain"]


def explain(directory: Path, prefix: str | None = None) -> Verdict:
    """What a directory of dumps shows.

    Args:
        directory: The directory that ranks wrote to; torch's own dumps are read too.
        prefix: What the files' names begin with; the one that most have, if None.

    Raises:
        ArgumentError: It has no dumps, or none that is in torch's format.
    """
    dumps = read_dumps(directory, prefix)
    findings = _failures(dumps) or find_slow(dumps)
    if not findings:
        calls = sum(len(of) for dump in dumps.ranks.values() for of in dump.calls.values())
        text = f"nothing failed: all ranks called the same, and none was late ({calls} calls)"
        findings = [Finding(Kind.NOTHING, (), text)]
    return Verdict(findings, len(dumps.world), sorted(dumps.ranks), _notes(dumps))


def _failures(dumps: Dumps) -> list[Finding]:
    gaps = find_gaps(dumps)
    mismatch = find_mismatch(dumps) or find_disagreement(dumps)
    timed = [each for each in (mismatch, find_error(dumps, gaps), find_crash(dumps)) if each]
    oldest_first = [finding for finding, _ in sorted(timed, key=lambda each: each[1])]
    found = [find_killed(dumps), *oldest_first]
    if not any(found):
        found = [find_ended(dumps, gaps), find_deadlock(dumps, gaps)]
    known = [finding for finding in found if finding is not None]
    named = {rank for finding in known for rank in finding.ranks}
    absent = find_elsewhere(dumps, gaps) or find_missing(dumps, gaps)
    if not known:
        absent = absent or find_not_in_group_call(dumps) or find_late(dumps)
    if absent is not None and not named.intersection(absent.ranks):
        known.append(absent)
    if not any(finding.ranks or finding.kind == Kind.MISMATCH for finding in known):
        unclear = find_unclear(dumps, gaps)
        return [*known, unclear] if unclear else known
    return known


def _notes(dumps: Dumps) -> list[str]:
    notes = []
    missing = [rank for rank in dumps.world if rank not in {*dumps.ranks, *dumps.damaged}]
    if dumps.earlier:
        notes.append(f"the dumps of ranks {dumps.earlier} are of an earlier run, and left out")
    if dumps.damaged:
        notes.append(f"the dumps of ranks {dumps.damaged} cannot be read")
    if missing:
        notes.append(f"no dump of ranks {missing}")
    if all(not dump.reason for dump in dumps.ranks.values()):
        notes.append(
            "dumps of torch's own recorder: they have no stacks of waiting ranks, and no ends"
        )
    return notes
