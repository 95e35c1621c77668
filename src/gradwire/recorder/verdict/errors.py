"""Ranks that differ or failed: another call, another value, an error, NaN, an interrupt."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from gradwire.recorder.files import ErrorRecord
from gradwire.recorder.verdict.dumps import Call, Dumps
from gradwire.recorder.verdict.evidence import (
    CERTAIN,
    Evidence,
    Finding,
    Kind,
    at_line,
    list_names,
    list_ranks,
    name_call,
    place_of,
    swallowing_handler,
    unique,
    was_interrupted,
)

_CHANGES = {"size": "the last batch, padding", "dtype": "autocast, a checkpoint"}
"""Usual causes of other tensors on one rank."""
_CONDITIONS = (
    "look for a condition on the rank or on its data before these lines",
    "look for iteration over a set, whose order differs between processes: sort it",
)
_SKIP_IF_ANY = "leave the step out on all ranks: skip_if_any of DistributedDataParallel"
_TIMES = 2  # on each rank, before anything is expected
_NUMBER = re.compile(r"\d+")
_TOGETHER_NS = 2_000_000_000  # ranks that fail with one error do so within this time


# -- other calls ---------------------------------------------------------------------------------


def find_mismatch(evidence: Evidence) -> Finding | None:
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
        return None
    when, calls, culprits = min(found, key=lambda each: each[0])
    return replace(_mismatch(evidence, calls, culprits), time=when)


def _mismatch(evidence: Evidence, calls: Mapping[int, Call], culprits: list[int]) -> Finding:
    """Describe different calls; there are no culprits if equally many ranks are on both sides."""
    first, who = next(iter(calls.values())), list_ranks(culprits or list(calls))
    mine = calls[culprits[0]] if culprits else first
    others = [
        rank
        for rank, call in calls.items()
        if (rank not in culprits if culprits else call.what != mine.what)
    ]
    theirs, kind = calls[others[0]], Kind.MISMATCH
    remedies: tuple[str, ...] = _CONDITIONS
    details = [f"rank {rank}: {name_call(call)}" for rank, call in sorted(calls.items())]
    for rank in culprits:
        if rank in evidence.dumps.ranks and evidence.dumps.ranks[rank].events:
            details.append(f"rank {rank} got {evidence.last_error(rank)}")
    field = "size" if mine.sizes != theirs.sizes else "dtype"
    same_line = mine.site == theirs.site
    number = f"number {theirs.number} of group {theirs.group}"
    one, other = (name_call(call, number=False) for call in (mine, theirs))
    if same_line:
        look, by = f"print the {field} before this line on all ranks", _CHANGES[field]
        remedies = (f"{look}: {by} and the model's configuration determine it",)
    if not culprits:
        what = f"called {mine.op} with different {field}s" if same_line else "made different calls"
        summary = f"{who} {what} ({number}), equally many each: {one}, and {other}"
    elif same_line:
        values = f"{_value(mine, field)} instead of {_value(theirs, field)}"
        summary = f"{who} called {name_call(mine)} with another {field} than {list_ranks(others)}: "
        summary += values
    elif _follows(evidence.dumps, theirs, mine):
        kind = Kind.SKIPPED
        step = f" of step {theirs.step}" if theirs.step is not None else ""
        summary = f"{who} skipped the {name_call(theirs)}{step}, which all other ranks called"
        details.insert(0, f"it continued with the {one}")
        remedies = ("look for a condition, `continue` or early `return` that only this rank takes",)
        handler = swallowing_handler(theirs.place)
        if handler is not None:
            details.insert(0, f"that line is in a `try` whose `except` in line {handler} continues")
            remedies = (
                f"an error was probably swallowed: print it in the `except` in line {handler} of "
                f"{theirs.frame['filename']} and re-raise it, or skip the step on all ranks",
            )
    else:
        summary = f"{who} called {one}, where {list_ranks(others)} called {other} ({number})"
    places, parameters = unique([mine.place, theirs.place]), mine.parameters or theirs.parameters
    finding = Finding(kind, culprits, summary, remedies, details, places, parameters)
    return replace(finding, confidence=CERTAIN)  # even if it is not known whose call is right


def _value(call: Call, field: str) -> str:
    return str([list(s) for s in call.sizes]) if field == "size" else " ".join(call.dtypes)


def _culprits(dumps: Dumps, calls: Mapping[int, Call]) -> list[int]:
    """Return the minority, or else ranks that skipped the call that always came next."""
    first = next(iter(calls.values()))
    # such as those of another host
    unknown = sum(rank not in dumps.ranks for rank in dumps.groups[first.group])
    few = _minority({rank: call.what for rank, call in calls.items()}, unknown)
    if few:
        return few
    expected = _expected(dumps, first)
    strange = [rank for rank, call in sorted(calls.items()) if call.site != expected]
    return strange if expected is not None and len(strange) < len(calls) else []


def _minority(values: Mapping[int, object], unknown: int = 0) -> list[int]:
    """Return the ranks without the most common value; empty if unknown ranks may change it."""
    (common, most), *others = Counter(values.values()).most_common()
    if others and most <= others[0][1] + unknown:
        return []
    return [rank for rank, value in sorted(values.items()) if value != common]


def _elsewhere_in_program(dumps: Dumps, calls: Mapping[int, Call]) -> list[int]:
    """Return the minority that made a call at another line, if it failed on all ranks."""
    # Sizes are no evidence where a collective allows different ones. Neither are lines that
    # occurred together before, such as those of a root and of the other ranks.
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


def _expected(dumps: Dumps, call: Call) -> tuple[str, str] | None:
    """Return the call that always followed the previous one, on all ranks; None if it varied."""
    # A call with a new size may be right, such as that of a last batch: only a skipped call is
    # judged by the calls before it.
    following: Counter[tuple[str, str]] = Counter()
    for dump in dumps.ranks.values():
        calls = [c for c in dump.calls.get(call.group, ()) if c.number < call.number]
        if not calls:
            return None
        following.update(b.site for a, b in pairwise(calls) if a.site == calls[-1].site)
    if len(following) != 1:
        return None
    ((found, times),) = following.items()
    return found if times >= _TIMES * len(dumps.ranks) else None


def _follows(dumps: Dumps, first: Call, second: Call) -> bool:
    """Return True if some rank made these two calls before, one after the other."""
    return any(
        (one.site, other.site) == (first.site, second.site) and other.number < first.number
        for dump in dumps.ranks.values()
        for one, other in pairwise(dump.calls.get(first.group, ()))
    )


# -- errors --------------------------------------------------------------------------------------


def _error(
    ranks: Sequence[int], event: ErrorRecord, summary: str, *remedies: str, kind: str = Kind.ERROR
) -> Finding:
    """Describe an error, whose message ends the summary."""
    return Finding(
        kind,
        ranks,
        f"{summary}: {event.text()}",
        remedies,
        places=place_of(event.lines),
        parameters=event.parameters,
        time=event.time,
    )


def find_error(evidence: Evidence) -> Finding | None:
    """Find the oldest error that no other rank's failure explains."""
    dumps = evidence.dumps
    errors = [(e.time, rank, e) for rank, events in evidence.primary.items() for e in events]
    if not errors:
        return None
    # one failure may have spread to all ranks with the data, such as a NaN
    when, _, event = min(errors, key=lambda each: each[0])
    same = sorted({r for _, r, e in errors if (e.type, e.message) == (event.type, event.message)})
    in_line = {
        r
        for t, r, e in errors
        if (e.type, e.lines[:1]) == (event.type, event.lines[:1]) and t - when < _TOGETHER_NS
    }
    failed = sorted({r for _, r, _ in errors})
    how = f"failed{at_line(event.lines)} with {event.type}"
    if failed != same and not dumps.same_clock(failed):
        text = "on hosts whose clocks are not comparable: one of the errors caused the others"
        remedies = ("compare these errors and the hosts' logs, which show the first one",)
        details = [f"rank {rank}: {evidence.last_error(rank)}" for rank in failed]
        summary = f"{list_ranks(failed)} failed, {text}"
        return Finding(Kind.UNCLEAR, (), summary, remedies, details, time=when)
    # ranks with an error that differs in numbers only, such as the rank's own
    what = event.type, event.lines[:1], _NUMBER.sub("", event.message)
    alike = {
        rank
        for rank, dump in dumps.ranks.items()
        for other in dump.events
        if (other.type, other.lines[:1], _NUMBER.sub("", other.message)) == what
    }
    # ranks that compare what they have with rank 0's fail if it is rank 0 that differs
    compared = not event.call and (len(alike) > 1 or len(dumps.world) == 2)
    if event.waited and (compared or len(in_line) == len(dumps.world) > 1):
        why = f"{how} when all compared what they have, and any rank may differ"
        remedy = "print the configuration on all ranks before this line, and compare"
        who = list_ranks(sorted(alike | in_line))
        return _error((), event, f"{who} {why}", remedy, kind=Kind.MISMATCH)
    if len(same) == len(dumps.world) > 1:
        why = f"{how}, for a reason that they share or that came to all of them with the data"
        return _error(
            (),
            event,
            f"all ranks {why}",
            "fix that line, if its reason is the same on all ranks",
            "if a NaN or infinity may have come from one rank, run with "
            "GRADWIRE_CHECK_FINITE=1, which names the first one",
        )
    ends = "and the process ended" if event.kind == "uncaught" else "raised by gradwire"
    return _error(same, event, f"{evidence.on_host(same)} {how}, {ends}", *_for_error(event))


def _for_error(event: ErrorRecord) -> tuple[str, ...]:
    """Return what to do about an error."""
    if "MemoryError" in event.type or "allocate memory" in event.message:
        return ("use less memory on this rank: a smaller batch, fewer workers, no retained graphs",)
    if event.parameters:
        names = ", ".join(event.parameters)
        return "follow the advice in the message", f"it names the parameters {names}"
    if event.type in ("ImportError", "ModuleNotFoundError"):
        return ("install the package where this rank runs: all ranks need one environment",)
    if event.type in ("PicklingError", "PickleError"):
        return ("send only objects that pickle can handle: no lambdas, local classes, open files",)
    return ("fix that line: the other ranks' errors follow from it",)


def find_disagreement(evidence: Evidence) -> Finding | None:
    """Find a disagreement that ranks recorded when comparing calls, beyond sizes and dtypes."""
    found = [e for dump in evidence.dumps.ranks.values() for e in dump.events if e.values]
    if not found:
        return None
    event = min(found, key=lambda each: each.time)
    ranks = _minority(event.values)
    passed = f"{list_ranks(ranks)} passed something else than the others: " if ranks else ""
    return Finding(
        Kind.MISMATCH,
        ranks,
        passed + " ".join(event.message.split()),
        ("pass the same on all ranks",),
        places=place_of(event.lines),
        time=event.time,
        confidence=CERTAIN,
    )


def find_reported(evidence: Evidence) -> Finding | None:
    """Find ranks that told the others of an error of theirs, which they may have swallowed."""
    told = [e for dump in evidence.dumps.ranks.values() for e in dump.events if e.reported]
    if not told:
        return None
    event = min(told, key=lambda each: each.time)
    ranks = sorted(event.reported)
    summary = f"{list_ranks(ranks)} had an error in backward, told the others and went on"
    look = "look for a `try` around backward() that swallows the error, and print it there"
    return _error(ranks, event, summary, look, _SKIP_IF_ANY)


def find_interrupted(evidence: Evidence) -> Finding | None:
    """Find the one rank that KeyboardInterrupt ended, before any other failure."""
    ranks = evidence.dumps.ranks
    found = [(r, e) for r, d in ranks.items() for e in d.events if e.type == "KeyboardInterrupt"]
    if len({rank for rank, _ in found}) != 1 or len(evidence.dumps.world) == 1:
        return None  # Ctrl-C reaches all ranks
    rank, event = found[-1]
    if not was_interrupted(event) or event.time > min(map(evidence.fails_at, ranks)):
        return None
    summary = f"{evidence.on_host([rank])} was interrupted by SIGINT{at_line(event.lines)}, "
    summary += "and no other rank was"
    remedies = ("find out what sent SIGINT: Ctrl-C in its terminal, or `kill -INT`",)
    place = place_of(event.lines)
    return Finding(Kind.ERROR, (rank,), summary, remedies, places=place, time=event.time)


def find_not_finite(evidence: Evidence) -> Finding | None:
    """Find the rank that was first about to send a NaN or infinity, if that was checked."""
    dumps = evidence.dumps
    noted = {rank: dump.not_finite[0] for rank, dump in dumps.ranks.items() if dump.not_finite}
    if not noted or not dumps.same_clock(noted):
        return None
    rank, first = min(noted.items(), key=lambda item: int(item[1]["time"]))
    at_step = f" in step {first['step']}" if first["step"] is not None else ""
    names = list(map(str, first["parameters"]))
    shown = f": {list_names(names)}" if names else ""
    return Finding(
        Kind.NOT_FINITE,
        (rank,),
        f"rank {rank} was the first with NaN or infinity, in {first['what']}{at_step}{shown}"
        f"{at_line(first['lines'])}",
        ("look at this rank's batch of that step, and at its loss", _SKIP_IF_ANY),
        places=place_of(first["lines"]),
        parameters=names,
        time=int(first["time"]),
    )
