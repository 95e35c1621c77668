"""Failures before the first collective: ranks not started, or started with other values."""

from __future__ import annotations

from collections import Counter

from gradwire.recorder.verdict.dumps import Start
from gradwire.recorder.verdict.evidence import Evidence
from gradwire.recorder.verdict.finding import (
    UNCLEAR,
    Finding,
    Kind,
    at_line,
    consequences,
    list_ranks,
    places_of,
)

_LOCAL = ("localhost", "127.", "::1")
_MUST_AGREE = ("MASTER_PORT", "MASTER_ADDR", "WORLD_SIZE")
_LOST_STORE = {"DistNetworkError", "DistStoreError"}


def _began(evidence: Evidence) -> bool:
    """Return True if a rank has made a collective, so that all ranks were there."""
    dumps = evidence.dumps
    calls = any(of for dump in dumps.ranks.values() for of in dump.calls.values())
    return calls or any(
        trace.calls or any(trace.counts.values()) for trace in dumps.traces.values()
    )


def find_same_rank(evidence: Evidence) -> list[Finding]:
    """Find two processes that were started with the same RANK."""
    starts = evidence.dumps.starts
    doubled = [rank for rank, n in Counter(start.rank for start in starts).items() if n > 1]
    if _began(evidence) or not doubled:
        return []
    rank = doubled[0]
    of = [start for start in starts if start.rank == rank]
    who = " and ".join(f"process {start.pid} on {start.host}" for start in of)
    expected = range(_world_size(of[0]) or 0)
    lacking = sorted(set(expected) - {start.rank for start in starts})
    lacks = f"; no process has RANK {', '.join(map(str, lacking))}" if lacking else ""
    return [
        Finding(
            Kind.START,
            (rank,),
            f"{len(of)} processes were started with RANK={rank}: {who}{lacks}",
            tuple(_variables(start) for start in of),
            (
                "give each process a RANK of its own, from 0 to WORLD_SIZE - 1",
                "on several hosts, RANK is node rank * processes per host + LOCAL_RANK",
            ),
            time=1,
        )
    ]


def find_other_values(evidence: Evidence) -> list[Finding]:
    """Find ranks that were started with another address, port or number of ranks."""
    starts = evidence.dumps.starts
    if _began(evidence) or len(starts) < 2:
        return []
    for name in _MUST_AGREE:
        values = Counter(start.launch.get(name, "(not set)") for start in starts)
        if len(values) < 2:
            continue
        (common, times), (_, next_times) = values.most_common(2)
        changed = sorted(
            {s.rank for s in starts if s.was and s.was.get(name) != s.launch.get(name)}
        )
        few = sorted({s.rank for s in starts if s.launch.get(name, "(not set)") != common})
        named = few if times > next_times else changed if len(changed) < len(starts) else []
        why = f"; the program changed it on {list_ranks(changed)}" if changed else ""
        shown = ", ".join(
            f"{list_ranks([s.rank for s in starts if s.launch.get(name, '(not set)') == value])} "
            f"{name}={value}"
            for value in values
        )
        return [
            Finding(
                Kind.START,
                tuple(named),
                f"the ranks were started with different values of {name}: {shown}; they look for "
                f"each other in different places{why}",
                tuple(consequences(evidence.dumps, few)),
                (f"set the same {name} for all ranks",),
                time=1,
                confidence="" if named else UNCLEAR,
            )
        ]
    return []


def find_never_started(evidence: Evidence) -> list[Finding]:
    """Find ranks of which no process was seen, while all others wait for them to join."""
    dumps = evidence.dumps
    sizes = {_world_size(start) for start in dumps.starts}
    if _began(evidence) or len(sizes) != 1 or not dumps.starts:
        return []
    size = sizes.pop() or 0
    seen = {start.rank for start in dumps.starts} | set(dumps.ranks)
    lacking = sorted(set(range(min(size, 1 << 16))) - seen)
    if not lacking or any(events for events in evidence.primary.values()):
        return []
    local = all(s.launch.get("MASTER_ADDR", "").startswith(_LOCAL) for s in dumps.starts)
    stack = next((dump.stack for dump in dumps.ranks.values() if dump.stack), [])
    where = "" if local else ", or write to another directory"
    return [
        Finding(
            Kind.START,
            tuple(lacking) if local else (),
            f"{list_ranks(lacking)} {'was' if len(lacking) == 1 else 'were'} never started{where}: "
            f"WORLD_SIZE is {size}, and {list_ranks(sorted(seen))} were seen",
            tuple(f"the others wait{at_line(stack)}" for _ in [1] if stack),
            (
                f"start a process for each rank from 0 to {size - 1}",
                f"or set WORLD_SIZE to {len(seen)} on all of them",
            ),
            places=tuple(places_of(stack)[:1]),
            time=1,
            confidence="" if local else UNCLEAR,
        )
    ]


def find_store_gone(evidence: Evidence) -> list[Finding]:
    """Find that rank 0 has ended, whose process held the store that the others use."""
    dumps = evidence.dumps
    lost = {
        rank: event
        for rank, dump in dumps.ranks.items()
        for event in dump.events
        if not _LOST_STORE.isdisjoint((event.type, *event.chain))
    }
    if not lost or 0 in lost or not evidence.is_over(0) or evidence.gaps:
        return []
    event = min(lost.values(), key=lambda each: each.time)
    if evidence.ends_at(0) > event.time:
        return []
    return [
        Finding(
            Kind.FINISHED,
            (0,),
            f"rank 0 had ended, and with it the store that {list_ranks(sorted(lost))} still needed"
            f"{at_line(event.lines)}",
            tuple(consequences(dumps, [0])),
            (
                "let rank 0 end last: call dist.barrier() at the end of the program on all ranks",
                "or run the store in the launcher, as torchrun and `gradwire run` do",
            ),
            places=tuple(places_of(event.lines)[:1]),
            time=evidence.ends_at(0),
        )
    ]


def _world_size(start: Start) -> int | None:
    text = start.launch.get("WORLD_SIZE", "")
    return int(text) if text.isdecimal() else None


def _variables(start: Start) -> str:
    values = " ".join(f"{name}={value}" for name, value in sorted(start.launch.items()))
    return f"process {start.pid} on {start.host}: {values}"
