"""Ranks that others wait for: they are in other code, came late, or have ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gradwire.recorder.verdict.doing import what_it_did, what_it_waited_for
from gradwire.recorder.verdict.dumps import Call, Dumps
from gradwire.recorder.verdict.evidence import (
    LONG_NS,
    OF_WHOLE_GROUPS,
    Evidence,
    Gap,
    waits_for_others,
    was_interrupted,
)
from gradwire.recorder.verdict.finding import (
    UNCLEAR,
    Finding,
    Kind,
    at_line,
    innermost,
    last_call,
    last_of,
    list_ranks,
    name_call,
    on_host,
    places_of,
)
from gradwire.recorder.verdict.source import is_conditional, swallowing_handler

_FOR_GIL = (
    "see what that line calls: an extension that does not release the GIL blocks all threads",
)
_STAYS_NS = 1_000_000_000  # a failed process waits for others' dumps, after it has written its own
_FOR_LATE = (
    "find out what it does before that line: a long evaluation, a checkpoint, a data loader",
    "or set a longer timeout for the group",
)


def find_not_in_group_call(evidence: Evidence) -> list[Finding]:
    """Find the one rank that is not in a call in which all others wait, such as `new_group`."""
    dumps = evidence.dumps
    stands = {rank: evidence.standing(rank) for rank in dumps.ranks}
    away = [rank for rank, at in stands.items() if at is None]
    there = {rank: at for rank, at in stands.items() if at is not None}
    if len(away) != 1 or len(there) < 2 or len(stands) < len(dumps.world):
        return []
    at = next(iter(there.values()))
    same = len({(o.op, o.filename, o.line) for o in there.values()}) == 1
    if at.op not in OF_WHOLE_GROUPS or not same:
        return []
    dump = dumps.ranks[away[0]]
    ended = dump.reason == "exit"
    where, details, remedies, places = what_it_did(evidence, away[0])
    return [
        Finding(
            Kind.FINISHED if ended else Kind.MISSING,
            tuple(away),
            f"rank {away[0]} {where}, while {list_ranks(list(there))} waited {at.words}",
            (f"rank {away[0]}: {last_call(dumps, away[0], None)}", *details),
            ("make this call on all ranks: look for a condition on the rank", *remedies)[:3],
            places=(*places, f"{at.filename}:{at.line}"),
        )
    ]


def find_missing(evidence: Evidence) -> list[Finding]:
    """Find ranks that have not called a collective in which others wait, and that do not wait."""
    dumps = evidence.dumps
    for gap in evidence.gaps:
        away = [
            rank
            for rank in gap.missing
            if evidence.standing(rank) is None and not evidence.is_victim(rank)
        ]
        ended = [rank for rank in away if dumps.ranks[rank].reason == "exit"]
        if ended and len(ended) == len(away):
            return [_uneven(evidence, gap, ended)]
        if away:
            return [_missing(evidence, gap, [r for r in away if r not in ended] or away)]
        silent = _silent_culprits(evidence, gap)
        if silent:
            return [_silent(evidence, gap, silent)]
    return []


def _uneven(evidence: Evidence, gap: Gap, ended: Sequence[int]) -> Finding:
    """Return a finding about ranks that made different numbers of calls and ended well."""
    dumps, call = evidence.dumps, next(iter(gap.calls.values()))
    victims = [rank for rank in gap.missing if evidence.is_victim(rank)]
    waiting, counts = sorted({*gap.calls, *victims}), counts_of(dumps, gap)
    if len(ended) < len(waiting) or (len(ended) == len(waiting) and _left_early(dumps, ended)):
        return _missing(evidence, gap, ended)
    common: dict[str, Any] = {
        "op": call.op,
        "group": call.group,
        "number": call.number,
        "time": call.created,
    }
    numbers = (
        "count the steps of each rank: `len(loader)`, the sampler and `drop_last` determine it",
        "use gradwire's or PyTorch's join() for uneven inputs",
    )
    what = f"the {name_call(call)} of group {gap.group}"
    place = (f"{call.filename}:{call.line}",)
    if len(ended) == len(waiting):
        summary = (
            f"the ranks made different numbers of calls: {list_ranks(waiting)} called {what}, and "
            f"{list_ranks(ended)} had ended; the records do not show which number is right"
        )
        return Finding(
            Kind.MISMATCH,
            (),
            summary,
            tuple(counts),
            numbers,
            places=place,
            confidence=UNCLEAR,
            **common,
        )
    summary = (
        f"{list_ranks(waiting)} made one more call than the others: {what}; {list_ranks(ended)} "
        "made the same number of calls and ended"
    )
    return Finding(
        Kind.MISMATCH, tuple(waiting), summary, tuple(counts), numbers, places=place, **common
    )


def _left_early(dumps: Dumps, ranks: Sequence[int]) -> bool:
    """Return True if ranks ended by a call of `sys.exit` in a loop or under a condition."""
    calls = [dumps.ranks[rank].exit for rank in ranks]
    return all(
        call is not None
        and bool(call.lines)
        and is_conditional(str(call.lines[0]["filename"]), int(call.lines[0]["line"]))
        for call in calls
    )


def _silent_culprits(evidence: Evidence, gap: Gap) -> list[int]:
    """Return ranks of a gap that wrote no dump: they run no Python, or nothing is known of them."""
    if gap.missing:
        return []
    frozen = [r for r in gap.silent if evidence.stopped_beating(r) is not None]
    frozen = [r for r in frozen if not waits_for_others(evidence.dumps.stacks.get(r, ()))]
    if frozen:
        return frozen
    if len(gap.silent) == 1 and evidence.standing(gap.silent[0]) is None:
        return list(gap.silent)
    return []


def _silent(evidence: Evidence, gap: Gap, ranks: Sequence[int]) -> Finding:
    dumps, call, rank = evidence.dumps, next(iter(gap.calls.values())), ranks[0]
    state, stack = evidence.states.get(rank), dumps.stacks.get(rank, [])
    known = rank in dumps.stacks or evidence.stopped_beating(rank) is not None
    trace = evidence.trace(rank)
    if not stack and known and trace is not None:
        stack = trace.stack
    others = any(rank in of for name, of in dumps.groups.items() if name != gap.group)
    where = f"; it runs no Python code{at_line(stack)}: C code holds the GIL" if known else ""
    remedies: tuple[str, ...] = _FOR_GIL
    if not known:
        where = ", and left no dump"
        remedies = (
            "see its log, and whether its process still runs: it may hang in C code",
            "check that its host can be reached",
        )
    return Finding(
        Kind.MISSING,
        () if others and not known else tuple(ranks),
        f"{list_ranks(ranks)} did not call the {name_call(call)} of group {gap.group}, in which "
        f"{_who_waits(gap)}{where}",
        (*([f"its process is {state}"] if state else []), last_call(dumps, rank, None)),
        remedies,
        **_of(call) | {"places": (*places_of(stack)[:1], f"{call.filename}:{call.line}")},
        confidence="" if known else UNCLEAR,
    )


def _missing(evidence: Evidence, gap: Gap, away: Sequence[int]) -> Finding:
    dumps, call = evidence.dumps, next(iter(gap.calls.values()))
    first = dumps.ranks[away[0]]
    ended = first.reason == "exit"
    interrupted = bool(first.events) and was_interrupted(first.events[-1])
    at, details, remedies, places = what_it_did(evidence, away[0])
    about = [f"rank {r}: {last_call(dumps, r, gap.group)}" for r in away]
    about += [f"rank {r} got {last_of(dumps.ranks[r])}" for r in away if dumps.ranks[r].events]
    handler = swallowing_handler(call.filename, call.line) if ended else None
    if handler is not None:
        about.append(f"line {call.line} is in a `try` whose `except` in line {handler} continues")
    return Finding(
        Kind.ERROR if interrupted else Kind.FINISHED if ended else Kind.MISSING,
        tuple(away),
        f"{list_ranks(away)}{on_host(dumps, away)} did not call the {name_call(call)} of group "
        f"{gap.group}, in which {_who_waits(gap)}; "
        f"{'it' if len(away) == 1 else f'rank {away[0]}'} {at}",
        (*details, *about, *counts_of(dumps, gap)),
        remedies,
        **_of(call) | {"places": (*places, f"{call.filename}:{call.line}")},
    )


def _who_waits(gap: Gap) -> str:
    return f"{list_ranks(list(gap.calls))} wait{'s' if len(gap.calls) == 1 else ''}"


def _of(call: Call) -> dict[str, Any]:
    return {
        "op": call.op,
        "group": call.group,
        "number": call.number,
        "places": (f"{call.filename}:{call.line}",),
        "parameters": call.parameters,
        "time": call.created,
    }


def counts_of(dumps: Dumps, gap: Gap) -> list[str]:
    """Count each rank's calls of the line of a gap, which shows whether a rank took fewer steps."""
    call = next(iter(gap.calls.values()))
    counts: dict[int, list[int]] = {}
    for rank, dump in dumps.ranks.items():
        times = sum(c.place == call.place for c in dump.calls.get(gap.group, ()))
        counts.setdefault(times, []).append(rank)
    if not call.filename or len(counts) < 2:
        return []
    each = [f"{list_ranks(ranks)} {times} times" for times, ranks in sorted(counts.items())]
    return [f"line {call.line} called it on " + ", on ".join(each)]


def find_late(evidence: Evidence) -> list[Finding]:
    """Find ranks that made a call only after others had given up waiting in it."""
    dumps = evidence.dumps
    for group, ranks in dumps.groups.items():
        calls = dumps.calls(group)
        for number in sorted(calls, reverse=True)[:3]:
            of = calls[number]
            if len(of) == len(ranks) > 1 and dumps.same_clock(of):
                found = _late_in(evidence, of)
                if found is not None:
                    return [found]
    return _late_errors(evidence)


def _late_in(evidence: Evidence, calls: Mapping[int, Call]) -> Finding | None:
    """Return a finding if some ranks called a collective after all others had failed in it."""
    ordered = sorted(calls, key=lambda rank: calls[rank].created)
    for count in range(len(ordered) - 1, 0, -1):
        first, late = ordered[:count], ordered[count:]
        came = min(calls[rank].created for rank in late)
        since = max(calls[rank].created for rank in first)
        gave_up = [evidence.fails_at(rank) for rank in first]
        if came - since > LONG_NS and max(gave_up) < came + LONG_NS // 10 and min(gave_up) > since:
            return _late(evidence, sorted(first), sorted(late), calls)
    return None


def _late(
    evidence: Evidence, first: list[int], late: list[int], calls: Mapping[int, Call]
) -> Finding:
    """Describe ranks that came late, with what they did when the others gave up, if recorded."""
    dumps, call = evidence.dumps, calls[late[0]]
    since, came = max(calls[r].created for r in first), calls[late[0]].created
    words, details, places, ranks = "", list[str](), tuple[str, ...](), late
    remedies: tuple[str, ...] = _FOR_LATE
    then = dumps.first(late[0])
    answered = then is not None and then.reason == "request"
    if innermost(dumps.stacks.get(late[0], ())):
        stack = dumps.stacks[late[0]]
        words = (
            f"; when they gave up, it did not answer{at_line(stack)}: C code held the GIL, or it "
        )
        words += "got no CPU"
        remedies, places = _FOR_GIL, tuple(places_of(stack)[:1])
    elif then is not None and answered:
        was, details, remedies, places = what_it_waited_for(then)
        words = f"; when they gave up, it {was}"
        by_pid = {dump.pid: rank for rank, dump in dumps.ranks.items()}
        holder = by_pid.get(int(then.kernel.get("holder") or -1))
        if holder is not None and holder not in late:
            words += f" (rank {holder})"
            ranks = sorted({*late, holder})
    about = _of(call)
    return Finding(
        Kind.DEADLOCK if len(ranks) > len(late) else Kind.MISSING,
        tuple(ranks),
        f"{list_ranks(late)} came {_seconds(came - since)} after {list_ranks(first)} to the "
        f"{name_call(call)}, which had given up by then{words}",
        (*details, *(f"rank {r}: {last_of(dumps.ranks[r])}" for r in first[:6])),
        remedies,
        **about | {"time": since, "places": (*places, *about["places"])},
    )


def _seconds(ns: int) -> str:
    return f"{ns / 1e9:.1f} s"


def _late_errors(evidence: Evidence) -> list[Finding]:
    """Find ranks whose error came long after all others had given up waiting and ended.

    They were not waiting when the others left, which would have ended their wait as well. This also
    finds a missing rank if no rank lacks a collective, such as with messages.
    """
    dumps = evidence.dumps
    failed_at = {r: d.events[-1].time if d.events else 0 for r, d in dumps.ranks.items()}
    ranks = sorted(failed_at, key=failed_at.__getitem__)
    waited = all(d.events and not evidence.primary[r] for r, d in dumps.ranks.items())
    if not waited or len(ranks) < len(dumps.world) or not dumps.same_clock({*ranks}):
        return []
    for count in range(1, len(ranks)):
        ended = max(dumps.ranks[rank].taken for rank in ranks[:count])
        if failed_at[ranks[count]] > ended + _STAYS_NS + LONG_NS:
            return [_came_late(dumps, failed_at, sorted(ranks[:count]), sorted(ranks[count:]))]
    return []


def _came_late(
    dumps: Dumps, failed_at: Mapping[int, int], first: list[int], late: list[int]
) -> Finding:
    event = dumps.ranks[late[0]].events[-1]
    after = _seconds(event.time - max(failed_at[rank] for rank in first))
    call = f" called {event.call}" if event.call else " arrived"
    who = "it" if len(late) == 1 else f"rank {late[0]}"
    return Finding(
        Kind.MISSING,
        tuple(late),
        f"{list_ranks(late)} did not arrive while {list_ranks(first)} waited; {who}{call}"
        f"{at_line(event.lines)} {after} after they had failed",
        tuple(
            [f"rank {r}: {last_of(dumps.ranks[r])}" for r in first[:6]]
            + [f"rank {r}: {last_call(dumps, r, None)}" for r in late[:2] if dumps.ranks[r].calls]
        ),
        _FOR_LATE,
        places=tuple(places_of(event.lines)[:1]),
    )
