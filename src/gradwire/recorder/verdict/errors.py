"""Ranks that failed: the oldest error, a reported one, NaN and infinity, an interrupt."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from gradwire.recorder.processes import OVER
from gradwire.recorder.verdict.dumps import Dumps, Event
from gradwire.recorder.verdict.evidence import (
    LONG_NS,
    Evidence,
    was_interrupted,
)
from gradwire.recorder.verdict.finding import (
    UNCLEAR,
    Finding,
    Kind,
    at_line,
    consequences,
    last_of,
    list_ranks,
    on_host,
    places_of,
    shortened,
)

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
            states.get(r) in OVER or (r in exits and exits[r].code)
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
