"""Rules about errors of ranks: find the cause among them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from gradwire.recorder.processes import OVER
from gradwire.recorder.verdict.compare import Gap
from gradwire.recorder.verdict.dumps import Dumps, Event
from gradwire.recorder.verdict.finding import Finding, Kind, list_ranks
from gradwire.recorder.verdict.standing import OF_WHOLE_GROUPS, is_primary, standing_of
from gradwire.recorder.verdict.wording import (
    at_line,
    consequences,
    innermost,
    last_of,
    places_of,
    shortened,
    states_of,
)

_MEMORY = ("MemoryError", "OutOfMemoryError")
_LONG_NS = 1_000_000_000
"""A rank that raised this long after calling a collective may have waited in it in vain."""


def with_errors(dumps: Dumps) -> set[int]:
    """Return ranks with an error that no other rank's failure explains."""
    return {
        rank
        for rank, dump in dumps.ranks.items()
        if any(is_primary(event, dump) for event in dump.events)
    }


def find_error(dumps: Dumps, gaps: Sequence[Gap]) -> tuple[Finding, int] | None:
    """Find the oldest error that no other rank's failure explains, and its time."""
    errors = [
        (event.time, rank, event)
        for rank, dump in dumps.ranks.items()
        for event in dump.events
        if is_primary(event, dump) and not _may_follow(dumps, gaps, rank, event)
    ]
    if not errors:
        return None
    when, rank, event = min(errors, key=lambda each: each[0])
    same = sorted({r for _, r, e in errors if (e.type, e.message) == (event.type, event.message)})
    others = {r for _, r, _ in errors} - set(same)
    if not dumps.same_clock({*same, *others}) and others:
        return _either(dumps, sorted({*same, *others})), when
    one = event.kind == "uncaught" and len(same) < len(dumps.world)
    culprits = [rank] if one and dumps.same_clock(same) else same
    return _failed(dumps, culprits, event), when


def _may_follow(dumps: Dumps, gaps: Sequence[Gap], rank: int, event: Event) -> bool:
    """Return True if a rank raised an error after waiting in vain for missing ranks."""
    for gap in gaps:
        call = gap.calls.get(rank)
        if call is None or call.done or call.created > event.time:
            continue
        states = states_of(dumps)
        dead = any(states.get(r) in OVER or r in dumps.exits for r in (*gap.missing, *gap.silent))
        if dead or event.time - call.created > _LONG_NS:
            return True
    return False


def _failed(dumps: Dumps, culprits: Sequence[int], event: Event) -> Finding:
    named = f" It names the parameters {', '.join(event.parameters)}." if event.parameters else ""
    at = at_line(event.lines)
    ends = "and the process ended" if event.kind == "uncaught" else "raised by gradwire"
    message = " ".join(event.message.split())
    return Finding(
        Kind.ERROR,
        tuple(culprits),
        f"{list_ranks(culprits)} failed{at} with {event.type}, {ends}: {shortened(message, 300)}",
        tuple(consequences(dumps, culprits)),
        _remedy(event) + named,
        places=tuple(places_of(event.lines)[:1]),
        parameters=event.parameters,
    )


def _either(dumps: Dumps, ranks: Sequence[int]) -> Finding:
    return Finding(
        Kind.UNCLEAR,
        (),
        f"{list_ranks(ranks)} failed, on hosts whose clocks are not comparable: one of the errors "
        "caused the others",
        tuple(f"rank {r}: {last_of(dumps.ranks[r])}" for r in ranks),
        "compare these errors and the hosts' logs, which show the first one",
    )


def find_disagreement(dumps: Dumps) -> tuple[Finding, int] | None:
    """Find a disagreement that ranks recorded when comparing calls, beyond sizes and dtypes."""
    found = [
        (event.time, rank, event)
        for rank, dump in dumps.ranks.items()
        for event in dump.events
        if event.values
    ]
    if not found:
        return None
    when, _, event = min(found, key=lambda each: each[0])
    counts = Counter(event.values.values()).most_common()
    common, times = counts[0]
    tied = len(counts) > 1 and counts[1][1] == times
    ranks = () if tied else tuple(r for r, v in sorted(event.values.items()) if v != common)
    summary = " ".join(event.message.split())
    if ranks:
        summary = f"{list_ranks(ranks)} made a different call from the others: {summary}"
    finding = Finding(
        Kind.MISMATCH,
        ranks,
        shortened(summary, 500),
        (),
        "pass the same on all ranks",
        places=tuple(places_of(event.lines)[:1]),
    )
    return finding, when


def find_unclear(dumps: Dumps, gaps: Sequence[Gap]) -> Finding | None:
    """Describe a failure whose cause the dumps do not show."""
    failed = sorted(rank for rank, dump in dumps.ranks.items() if dump.events)
    codes = {rank: exit_.code for rank, exit_ in dumps.exits.items() if exit_.code}
    stands = [standing_of(dumps, rank) for rank in dumps.ranks]
    stuck = any(at is not None and at.op in OF_WHOLE_GROUPS for at in stands)
    if not failed and not codes and not gaps and not stuck:
        return None
    what = f"{list_ranks(failed)} failed" if failed else "the ranks are stuck"
    differences = _differences(dumps)
    return Finding(
        Kind.MISMATCH if differences else Kind.UNCLEAR,
        (),
        differences or f"{what}, and the recorded data does not show which rank caused it",
        _last_of_each(dumps, failed, codes),
        "pass the same on all ranks"
        if differences
        else "check the first of these errors, and the logs and hosts of ranks without a dump",
        places=tuple(p for r in failed[:1] for p in places_of(dumps.ranks[r].events[-1].lines)[:1]),
    )


def _last_of_each(dumps: Dumps, failed: Sequence[int], codes: Mapping[int, int]) -> tuple[str, ...]:
    details = [f"rank {rank}: {last_of(dumps.ranks[rank])}" for rank in failed]
    for rank in sorted({*dumps.world} - {*failed}):
        at = standing_of(dumps, rank)
        where = innermost(dumps.ranks[rank].stack) if rank in dumps.ranks else ""
        if at is not None:
            details.append(f"rank {rank} waited {at.words}")
        elif where:
            details.append(f"rank {rank} was {where}")
        elif rank in codes:
            details.append(f"rank {rank} ended with exit code {codes[rank]}")
        elif rank not in dumps.ranks:
            details.append(f"rank {rank} left no dump")
    return (*details[:8], *([f"… and {len(details) - 8} more"] if details[8:] else []))


def _differences(dumps: Dumps) -> str:
    """Return the ranks' comparison of their calls if all of them failed with a mismatch."""
    last = [dump.events[-1] for dump in dumps.ranks.values() if dump.events]
    if not last or any(event.type != "MismatchError" for event in last):
        return ""
    return shortened(" ".join(last[0].message.split()), 500)


def _remedy(event: Event) -> str:
    if event.type in _MEMORY or "allocate memory" in event.message:
        return "use less memory on this rank: a smaller batch, fewer workers, no retained graphs."
    if event.parameters:
        return "follow the remedy in the message."
    return "fix that line: it caused the other ranks' errors."
