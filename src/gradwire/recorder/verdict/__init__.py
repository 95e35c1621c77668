"""Verdict on a directory of dumps: the rank and the cause.

The rules look for, in this order: ranks that called different operations, or an error that nothing
else explains, whichever came first; a process that crashed, was killed or stopped; ranks that wait
for each other; a missing rank. If nothing failed, they look for slow ranks and transfers.
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
    """Return the verdict on a directory of dumps.

    Args:
        directory: Directory that ranks wrote to; dumps of torch's flight recorder work too.
        prefix: Prefix of file names. Default: the most common one.

    Raises:
        ArgumentError: The directory has no dumps, or none in torch's format.
    """
    dumps = read_dumps(directory, prefix)
    findings = _failures(dumps) or find_slow(dumps)
    if not findings:
        calls = sum(len(of) for dump in dumps.ranks.values() for of in dump.calls.values())
        text = f"nothing failed: all ranks made the same calls, and none was late ({calls} calls)"
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
        notes.append(f"the dumps of ranks {dumps.earlier} belong to an earlier run and are ignored")
    if dumps.damaged:
        notes.append(f"the dumps of ranks {dumps.damaged} cannot be read")
    if missing:
        notes.append(f"no dump of ranks {missing}")
    if all(not dump.reason for dump in dumps.ranks.values()):
        notes.append(
            "dumps of torch's own recorder: they lack stacks of waiting ranks and end times"
        )
    return notes
