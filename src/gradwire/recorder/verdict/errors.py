"""Differences between the calls of ranks: another call, other sizes, or one that was skipped."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from gradwire._processes import ENDED
from gradwire.recorder.verdict.dumps import Call, Dumps, Event
from gradwire.recorder.verdict.evidence import (
    LONG_NS,
    UNCLEAR,
    Evidence,
    Finding,
    Kind,
    at_line,
    consequences,
    last_of,
    list_ranks,
    name_call,
    on_host,
    places_of,
    shortened,
    swallowing_handler,
    was_interrupted,
)

_OTHER = {
    "size": "print the shape before this line on all ranks: the last batch, padding and the "
    "model's configuration determine it",
    "dtype": "print the dtype before this line on all ranks: autocast, a checkpoint and the "
    "model's configuration determine it",
}
_CONDITIONS = (
    "look for a condition on the rank or on its data before these lines",
    "look for iteration over a set, whose order differs between processes: sort it",
)
_TIMES = 2  # on each rank, before anything is expected


def find_mismatch(evidence: Evidence) -> list[Finding]:
    """Find the oldest collective in which ranks made different calls."""
    dumps = evidence.dumps
    found: list[tuple[int, dict[int, Call], list[int]]] = []
    for group in dumps.groups:
        for calls in dumps.calls(group).values():
            culprits = None
            if len({call.what for call in calls.values()}) > 1:
                culprits = _culprits(dumps, calls)
            elif all(call.error for call in calls.values()):
                culprits = _elsewhere_in_program(dumps, calls) or None
            if culprits is not None:
                found.append((max(call.created for call in calls.values()), calls, culprits))
                break
    if not found:
        return []
    when, calls, culprits = min(found, key=lambda each: each[0])
    finding = _mismatch(dumps, calls, culprits) if culprits else _undecided(calls)
    return [replace(finding, time=when)]


def find_disagreement(evidence: Evidence) -> list[Finding]:
    """Find a disagreement that ranks recorded when comparing calls, beyond sizes and dtypes."""
    found = [
        (event.time, event)
        for dump in evidence.dumps.ranks.values()
        for event in dump.events
        if event.values
    ]
    if not found:
        return _all_raised(evidence)
    when, event = min(found, key=lambda each: each[0])
    counts = Counter(event.values.values()).most_common()
    common, times = counts[0]
    tied = len(counts) > 1 and counts[1][1] == times
    ranks = () if tied else tuple(r for r, v in sorted(event.values.items()) if v != common)
    summary = " ".join(event.message.split())
    if ranks:
        summary = f"{list_ranks(ranks)} passed something else than the others: {summary}"
    places = tuple(places_of(event.lines)[:1])
    remedies = ("pass the same on all ranks",)
    return [Finding(Kind.MISMATCH, ranks, summary, remedies=remedies, places=places, time=when)]


def _all_raised(evidence: Evidence) -> list[Finding]:
    """Find that C++ code raised on all ranks in one line, as when it compares their models."""
    dumps = evidence.dumps
    firsts = [dump.events[0] for dump in dumps.ranks.values() if dump.events]
    alike = {(e.type, e.call, str(e.lines[:1])) for e in firsts}
    event = min(firsts, key=lambda each: each.time, default=None)
    if event is None or len(firsts) < max(2, len(dumps.world)) or len(alike) > 1:
        return []
    late = max(e.time for e in firsts) - event.time > LONG_NS
    waited = any(
        event.time - call.created > LONG_NS
        for dump in dumps.ranks.values()
        for call in dump.pending
    )
    ended = any(evidence.ends_at(rank) < event.time for rank in dumps.world)
    if late or waited or ended or event.call or not event.waited or event.type != "RuntimeError":
        return []
    return [
        Finding(
            Kind.MISMATCH,
            (),
            "all ranks failed in one line when they compared what they have: "
            + " ".join(event.message.split()),
            remedies=("print the model and the configuration on all ranks before this line",),
            places=tuple(places_of(event.lines)[:1]),
            time=event.time,
            confidence=UNCLEAR,
        )
    ]


def _mismatch(dumps: Dumps, calls: Mapping[int, Call], culprits: list[int]) -> Finding:
    others = [rank for rank in calls if rank not in culprits]
    mine, theirs = calls[culprits[0]], calls[others[0]]
    details = [f"rank {rank}: {name_call(call)}" for rank, call in sorted(calls.items())]
    details += [
        f"rank {rank} got {last_of(dumps.ranks[rank])}"
        for rank in culprits
        if rank in dumps.ranks and dumps.ranks[rank].events
    ]
    common: dict[str, Any] = {
        "op": theirs.op,
        "group": theirs.group,
        "number": theirs.number,
        "places": tuple(dict.fromkeys(f"{c.filename}:{c.line}" for c in (mine, theirs))),
        "parameters": mine.parameters or theirs.parameters,
    }
    who = list_ranks(culprits)
    if (mine.op, mine.place) == (theirs.op, theirs.place):
        field = _differing(mine, theirs)
        return Finding(
            Kind.MISMATCH,
            tuple(culprits),
            f"{who} called {name_call(mine)} with another {field} than "
            f"{list_ranks(others)}: {_value(mine, field)} instead of {_value(theirs, field)}",
            tuple(details),
            (_OTHER[field],),
            **common,
        )
    if _follows(dumps, theirs, mine):
        return _skipped(culprits, mine, theirs, details, common)
    return Finding(
        Kind.MISMATCH,
        tuple(culprits),
        f"{who} called {name_call(mine, number=False)}, where {list_ranks(others)} called "
        f"{name_call(theirs, number=False)} (number {theirs.number} of group {theirs.group})",
        tuple(details),
        _CONDITIONS,
        **common,
    )


def _skipped(
    culprits: list[int], mine: Call, theirs: Call, details: list[str], common: dict[str, Any]
) -> Finding:
    who = list_ranks(culprits)
    step = f" of step {theirs.step}" if theirs.step is not None else ""
    details = [f"it continued with the {name_call(mine, number=False)}", *details]
    remedies = ("look for a condition, `continue` or early `return` that only this rank takes",)
    handler = swallowing_handler(theirs.filename, theirs.line)
    if handler is not None:
        details.insert(0, f"that line is in a `try` whose `except` in line {handler} continues")
        remedies = (
            f"an error was probably swallowed: print it in the `except` in line {handler} of "
            f"{theirs.filename} and re-raise it, or skip the step on all ranks",
        )
    return Finding(
        Kind.SKIPPED,
        tuple(culprits),
        f"{who} skipped the {name_call(theirs)}{step}, which all other ranks called",
        tuple(details),
        remedies,
        **common,
    )


def _undecided(calls: Mapping[int, Call]) -> Finding:
    """Return a finding without a culprit, for equally many ranks on both sides."""
    first = next(iter(calls.values()))
    other = next(call for call in calls.values() if call.what != first.what)
    what, which = "made different calls", f"number {first.number} of group {first.group}"
    field = ""
    if (first.op, first.place) == (other.op, other.place):
        field = _differing(first, other)
        what = f"called {first.op} with different {field}s"
    return Finding(
        Kind.MISMATCH,
        (),
        f"{list_ranks(list(calls))} {what} ({which}), equally many each: "
        f"{name_call(first, number=False)}, and {name_call(other, number=False)}",
        tuple(f"rank {rank}: {name_call(call)}" for rank, call in sorted(calls.items())),
        (_OTHER[field],) if field else _CONDITIONS,
        first.op,
        first.group,
        first.number,
        tuple(dict.fromkeys(f"{c.filename}:{c.line}" for c in (first, other))),
    )


def _differing(one: Call, other: Call) -> str:
    return "size" if one.sizes != other.sizes else "dtype"


def _culprits(dumps: Dumps, calls: Mapping[int, Call]) -> list[int]:
    """Return the minority, or else ranks that skipped the call that always came next."""
    groups: dict[object, list[int]] = {}
    for rank, call in sorted(calls.items()):
        groups.setdefault(call.what, []).append(rank)
    *_, second, most = sorted(len(ranks) for ranks in groups.values())
    of_group = dumps.groups[next(iter(calls.values())).group]
    unknown = sum(rank not in dumps.ranks for rank in of_group)  # such as those of another host
    if most <= second + unknown:
        expected = _expected(dumps, next(iter(calls.values())))
        strange = [r for r, call in sorted(calls.items()) if (call.op, call.place) != expected]
        return strange if expected is not None and len(strange) < len(calls) else []
    ((common, _),) = Counter(call.what for call in calls.values()).most_common(1)
    return [rank for rank, call in sorted(calls.items()) if call.what != common]


def _elsewhere_in_program(dumps: Dumps, calls: Mapping[int, Call]) -> list[int]:
    """Return the minority that made a call at another line, if it failed on all ranks.

    Sizes are no evidence where a collective allows different ones. Neither are lines that occurred
    together before, such as those of a root and of the other ranks.
    """
    ((most, times),) = Counter(call.place for call in calls.values()).most_common(1)
    few = [rank for rank, call in sorted(calls.items()) if call.place != most]
    lines = {calls[rank].place for rank in few}
    if not few or 2 * times <= len(calls):
        return []
    first, together = next(iter(calls.values())), False
    for number, earlier in dumps.calls(first.group).items():
        places = {call.place for call in earlier.values()}
        if number < first.number and most in places:
            if places & lines:
                return []
            together = together or len(earlier) == len(calls)
    return few if together else []


def _expected(dumps: Dumps, call: Call) -> tuple[str, tuple[str, int]] | None:
    """Return the call that always followed the previous one, on all ranks; None if it varied.

    A call with a new size may be right, such as that of a last batch. Only a skipped call is judged
    by the calls before it.
    """
    following: Counter[tuple[str, tuple[str, int]]] = Counter()
    for dump in dumps.ranks.values():
        calls = [c for c in dump.calls.get(call.group, ()) if c.number < call.number]
        if not calls:
            return None
        last = (calls[-1].op, calls[-1].place)
        for one, next_one in pairwise(calls):
            if (one.op, one.place) == last:
                following[next_one.op, next_one.place] += 1
    if len(following) != 1:
        return None
    ((found, times),) = following.items()
    return found if times >= _TIMES * len(dumps.ranks) else None


def _follows(dumps: Dumps, first: Call, second: Call) -> bool:
    """Return True if some rank made these two calls before, one after the other."""
    for dump in dumps.ranks.values():
        calls = dump.calls.get(first.group, [])
        for one, next_one in pairwise(calls):
            if next_one.number >= first.number:
                break
            if (one.op, one.place) == (first.op, first.place) and (
                (next_one.op, next_one.place) == (second.op, second.place)
            ):
                return True
    return False


def _value(call: Call, field: str) -> str:
    return str([list(s) for s in call.sizes]) if field == "size" else " ".join(call.dtypes)


_MEMORY = ("MemoryError", "OutOfMemoryError")
_IMPORT = ("ImportError", "ModuleNotFoundError")
_PICKLE = ("PicklingError", "PickleError")
_NUMBER = re.compile(r"\d+")
_TOGETHER_NS = 2_000_000_000  # ranks that fail with one error do so within this time


def find_error(evidence: Evidence) -> list[Finding]:
    """Find the oldest error that no other rank's failure explains."""
    dumps = evidence.dumps
    errors = [
        (event.time, rank, event)
        for rank, events in evidence.primary.items()
        for event in events
        if not _may_follow(evidence, rank, event)
    ]
    if not errors:
        return []
    # one failure may have spread to all ranks with the data, such as a NaN
    when, _, event = min(errors, key=lambda each: each[0])
    same = sorted({r for _, r, e in errors if (e.type, e.message) == (event.type, event.message)})
    in_line = {
        r
        for t, r, e in errors
        if (e.type, e.lines[:1]) == (event.type, event.lines[:1]) and t - when < _TOGETHER_NS
    }
    others = {r for _, r, _ in errors} - set(same)
    if not dumps.same_clock({*same, *others}) and others:
        return [_either(dumps, sorted({*same, *others}), when)]
    alike = _alike(dumps, event)
    # ranks that compare what they have with rank 0's fail if it is rank 0 that differs
    compared = not event.call and (len(alike) > 1 or len(dumps.world) == 2)
    if event.waited and (compared or len(in_line) == len(dumps.world) > 1):
        return [_disagree(sorted(alike | in_line), event, when)]
    if len(same) == len(dumps.world) > 1:
        return [_all_failed(evidence, event, when)]
    return [replace(_failed(dumps, same, event), time=when)]


def _alike(dumps: Dumps, event: Event) -> set[int]:
    """Return the ranks with an error that differs in numbers only, such as the rank's own."""
    what = event.type, event.lines[:1], _NUMBER.sub("", event.message)
    return {
        rank
        for rank, dump in dumps.ranks.items()
        for other in dump.events
        if (other.type, other.lines[:1], _NUMBER.sub("", other.message)) == what
    }


def _may_follow(evidence: Evidence, rank: int, event: Event) -> bool:
    """Return True if a rank raised an error after waiting in vain for missing ranks."""
    for gap in evidence.gaps:
        call = gap.calls.get(rank)
        if call is None or call.done or call.created > event.time:
            continue
        states, exits = evidence.states, evidence.dumps.exits
        dead = any(
            states.get(r) in ENDED or (r in exits and exits[r].code)
            for r in (*gap.missing, *gap.silent)
        )
        if dead or event.time - call.created > LONG_NS:
            return True
    return False


def _failed(dumps: Dumps, culprits: Sequence[int], event: Event) -> Finding:
    at = at_line(event.lines)
    ends = "and the process ended" if event.kind == "uncaught" else "raised by gradwire"
    message = " ".join(event.message.split())
    return Finding(
        Kind.ERROR,
        tuple(culprits),
        f"{list_ranks(culprits)}{on_host(dumps, culprits)} failed{at} with {event.type}, {ends}: "
        f"{shortened(message, 600)}",
        tuple(consequences(dumps, culprits)),
        _for_error(event),
        places=tuple(places_of(event.lines)[:1]),
        parameters=event.parameters,
    )


def _for_error(event: Event) -> tuple[str, ...]:
    """Return what to do about an error."""
    if event.type in _MEMORY or "allocate memory" in event.message:
        return ("use less memory on this rank: a smaller batch, fewer workers, no retained graphs",)
    if event.parameters:
        return (
            "follow the advice in the message",
            f"it names the parameters {', '.join(event.parameters)}",
        )
    if event.type in _IMPORT:
        return ("install the package where this rank runs: all ranks need one environment",)
    if event.type in _PICKLE:
        return ("send only objects that pickle can handle: no lambdas, local classes, open files",)
    return ("fix that line: the other ranks' errors follow from it",)


def _disagree(ranks: Sequence[int], event: Event, when: int) -> Finding:
    message = shortened(" ".join(event.message.split()), 600)
    return Finding(
        Kind.MISMATCH,
        (),
        f"{list_ranks(ranks)} failed{at_line(event.lines)} with {event.type} when all "
        f"compared what they have, and any rank may differ: {message}",
        (),
        ("print the configuration on all ranks before this line, and compare",),
        places=tuple(places_of(event.lines)[:1]),
        time=when,
        confidence=UNCLEAR,
    )


def _all_failed(evidence: Evidence, event: Event, when: int) -> Finding:
    message = shortened(" ".join(event.message.split()), 600)
    return Finding(
        Kind.ERROR,
        (),
        f"all ranks failed{at_line(event.lines)} with {event.type}, for a reason that they share "
        f"or that came to all of them with the data: {message}",
        (),
        (
            "fix that line, if its reason is the same on all ranks",
            "if a NaN or infinity may have come from one rank, run with GRADWIRE_CHECK_FINITE=1, "
            "which names the first one",
        ),
        places=tuple(places_of(event.lines)[:1]),
        parameters=event.parameters,
        time=when,
        confidence=UNCLEAR,
    )


def _either(dumps: Dumps, ranks: Sequence[int], when: int) -> Finding:
    return Finding(
        Kind.UNCLEAR,
        (),
        f"{list_ranks(ranks)} failed, on hosts whose clocks are not comparable: one of the errors "
        "caused the others",
        tuple(f"rank {r}: {last_of(dumps.ranks[r])}" for r in ranks),
        ("compare these errors and the hosts' logs, which show the first one",),
        time=when,
        confidence=UNCLEAR,
    )


def find_reported(evidence: Evidence) -> list[Finding]:
    """Find ranks that told the others of an error of theirs, which they may have swallowed."""
    told = [
        (event.time, event)
        for dump in evidence.dumps.ranks.values()
        for event in dump.events
        if event.reported
    ]
    if not told:
        return []
    when, event = min(told, key=lambda each: each[0])
    ranks = tuple(sorted(event.reported))
    message = shortened(" ".join(event.message.split()), 600)
    return [
        Finding(
            Kind.ERROR,
            ranks,
            f"{list_ranks(ranks)} had an error in backward, told the others and went on: {message}",
            tuple(consequences(evidence.dumps, ranks)),
            (
                "look for a `try` around backward() that swallows the error, and print it there",
                "leave the step out on all ranks: skip_if_any of DistributedDataParallel",
            ),
            places=tuple(places_of(event.lines)[:1]),
            time=when,
        )
    ]


def find_not_finite(evidence: Evidence) -> list[Finding]:
    """Find the rank that was first about to send a NaN or infinity, if that was checked."""
    dumps = evidence.dumps
    noted = {rank: dump.not_finite[0] for rank, dump in dumps.ranks.items() if dump.not_finite}
    if not noted or not dumps.same_clock(noted):
        return []
    rank, first = min(noted.items(), key=lambda item: int(item[1]["time"]))
    at_step = f" in step {first['step']}" if first["step"] is not None else ""
    names = tuple(map(str, first["parameters"]))
    shown = f": {', '.join(names[:3])}{', …' if names[3:] else ''}" if names else ""
    return [
        Finding(
            Kind.NOT_FINITE,
            (rank,),
            f"rank {rank} was the first with NaN or infinity, in {first['what']}{at_step}{shown}"
            f"{at_line(first['lines'])}",
            tuple(consequences(dumps, [rank])),
            (
                "look at this rank's batch of that step, and at its loss",
                "leave the step out on all ranks: skip_if_any of DistributedDataParallel",
            ),
            places=tuple(places_of(first["lines"])[:1]),
            parameters=names,
            time=int(first["time"]),
        )
    ]


def find_interrupted(evidence: Evidence) -> list[Finding]:
    """Find the one rank that KeyboardInterrupt ended."""
    dumps = evidence.dumps
    found = {
        rank: event
        for rank, dump in dumps.ranks.items()
        for event in dump.events
        if event.type == "KeyboardInterrupt"
    }
    if len(found) != 1 or len(dumps.world) == 1:
        return []  # Ctrl-C reaches all ranks
    ((rank, event),) = found.items()
    if not was_interrupted(event) or event.time > evidence.first_failure:
        return []
    return [
        Finding(
            Kind.ERROR,
            (rank,),
            f"rank {rank}{on_host(dumps, [rank])} was interrupted by SIGINT{at_line(event.lines)}, "
            "and no other rank was",
            tuple(consequences(dumps, [rank])),
            ("find out what sent SIGINT: Ctrl-C in its terminal, or `kill -INT`",),
            places=tuple(places_of(event.lines)[:1]),
            time=event.time,
        )
    ]
