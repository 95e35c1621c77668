"""Verdict on a directory of dumps: the rank and the cause.

`dumps` reads them, `evidence` derives facts from them, and the table in `rules` decides.
If nothing failed, `slow` looks for slow ranks and transfers.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from gradwire.recorder.verdict.dumps import Dumps, read_dumps
from gradwire.recorder.verdict.evidence import (
    Evidence,
    Finding,
    Kind,
    Verdict,
    by_ranks,
    list_ranks,
)
from gradwire.recorder.verdict.rules import find_failures
from gradwire.recorder.verdict.slow import find_slow

__all__ = ["Finding", "Kind", "Verdict", "explain", "list_ranks"]

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
