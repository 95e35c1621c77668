"""Ranks that differ or failed: another call, another value, an error, NaN."""

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
    LIKELY,
    Evidence,
    Finding,
    Kind,
    at_line,
    by_ranks,
    iterates_over_set,
    list_names,
    list_ranks,
    name_call,
    place_of,
    unique,
)

_CHANGES = {"size": "the last batch, padding", "dtype": "autocast, a checkpoint"}
"""Usual causes of other tensors on one rank."""
_CONDITION = "look for a condition on the rank or on its data before these lines"
_ORDER = "sort what the loop iterates over: the order of a set differs between processes"
_SKIP_IF_ANY = "leave the step out on all ranks: skip_if_any of DistributedDataParallel"
_TIMES = 2  # on each rank, before anything is expected
_NUMBER = re.compile(r"\d+")
_TOGETHER_NS = 2_000_000_000  # ranks that fail with one error do so within this time


# -- other calls ---------------------------------------------------------------------------------


def find_mismatch(evidence: Evidence) -> Finding | None:
    """Find the oldest collective in which ranks made different calls or passed other values."""
    return _other_call(evidence) or _other_value(evidence)


def _other_call(evidence: Evidence) -> Finding | None:
    dumps = evidence.dumps
    found: list[tuple[int, dict[int, Call], list[int]]] = []
    for group in dumps.groups:
        for calls in dumps.calls(group).values():
            culprits = None
            if len({call.what for call in calls.values()}) > 1:
                culprits = _culprits(dumps, calls)
            elif all(call.error for call in calls.values()):
                few = _minority({rank: call.place for rank, call in calls.items()})
                other = evidence.first_other_line(few) if few else None
                culprits = few if other and other[0] in calls.values() else None
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
    remedies: tuple[str, ...] = (_CONDITION,)
    details = by_ranks({rank: name_call(call) for rank, call in calls.items()})
    field = "size" if mine.sizes != theirs.sizes else "dtype"
    same_line = mine.site == theirs.site
    number = f"another {field}, " if same_line else ""
    number += f"number {theirs.number} of group {theirs.group}"
    one, other = (name_call(call, number=False) for call in (mine, theirs))
    if same_line:
        look, by = f"print the {field} before this line on all ranks", _CHANGES[field]
        remedies = (f"{look}: {by} and the model's configuration determine it",)
    if iterates_over_set(mine.place):
        remedies = (_ORDER, *remedies)
    if not culprits:
        summary = f"{who} made different calls ({number}), equally many each: {one}, and {other}"
    elif not same_line and _follows(evidence.dumps, theirs, mine):
        kind = Kind.SKIPPED
        step = f" of step {theirs.step}" if theirs.step is not None else ""
        summary = f"{who} skipped the {name_call(theirs)}{step}, which all other ranks called"
        details.insert(0, f"it continued with the {one}")
        remedies = ("look for a condition, `continue` or early `return` that only this rank takes",)
    else:
        summary = f"{who} called {one}, where {list_ranks(others)} called {other} ({number})"
    places, parameters = unique([mine.place, theirs.place]), mine.parameters or theirs.parameters
    finding = Finding(kind, culprits, summary, remedies, details, places, parameters)
    return replace(finding, confidence=CERTAIN)  # even if it is not known whose call is right


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
    text = f": {event.text()}" if event.message else ""
    places = place_of(event.lines)
    if event.root:
        # an error in a `finally`, or in the handling of the first one, takes its place
        root = " ".join(event.root.split())[:300]
        text += f"; before it came {root}{at_line(event.root_lines)}"
        places = unique([*place_of(event.root_lines), *places])
    return Finding(
        kind,
        ranks,
        f"{summary}{text}",
        remedies,
        places=places,
        parameters=event.parameters,
        time=event.time,
    )


def find_error(evidence: Evidence) -> Finding | None:
    """Find the oldest error that no other rank's failure explains."""
    dumps = evidence.dumps
    errors = [(e.time, rank, e) for rank, events in evidence.primary.items() for e in events]
    if not errors:
        return _reported(evidence)
    # one failure may have spread to all ranks with the data, such as a NaN
    when, _, event = min(errors, key=lambda each: each[0])
    same = sorted({r for _, r, e in errors if (e.type, e.message) == (event.type, event.message)})
    in_line = {
        r
        for t, r, e in errors
        if (e.type, e.lines[:1]) == (event.type, event.lines[:1]) and t - when < _TOGETHER_NS
    }
    failed = sorted({r for _, r, _ in errors})
    where = " in a worker of its data loader," if event.own else ""
    how = f"failed{where}{at_line(event.lines)} with {event.type}"
    if failed != same and not dumps.same_clock(failed):
        text = "on hosts whose clocks are not comparable: one of the errors caused the others"
        remedies = ("compare these errors and the hosts' logs, which show the first one",)
        details = by_ranks({rank: evidence.last_error(rank) for rank in failed})
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
    if event.type == "KeyboardInterrupt":
        how = f"was interrupted by SIGINT{at_line(event.lines)}, and no other rank was"
    return _error(same, event, f"{list_ranks(same)} {how}", *_for_error(event))


def _for_error(event: ErrorRecord) -> tuple[str, ...]:
    """Return what to do about an error."""
    if event.type == "KeyboardInterrupt":
        return ("find out what sent SIGINT: Ctrl-C in its terminal, or `kill -INT`",)
    if event.own:
        return (
            "look at the worker's error in its log, or load with num_workers=0 to see it",
            "if it was killed, give it more memory: fewer workers, a smaller prefetch_factor",
        )
    if "MemoryError" in event.type or "allocate memory" in event.message:
        return ("use less memory on this rank: a smaller batch, fewer workers, no retained graphs",)
    if event.parameters:
        names = ", ".join(event.parameters)
        return "follow the advice in the message", f"it names the parameters {names}"
    if event.type in ("ImportError", "ModuleNotFoundError"):
        return ("install the package where this rank runs: all ranks need one environment",)
    return ("fix that line: the other ranks' errors follow from it",)


def _other_value(evidence: Evidence) -> Finding | None:
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


def _reported(evidence: Evidence) -> Finding | None:
    """Find ranks that told the others of an error of theirs, which they may have swallowed."""
    told = [e for dump in evidence.dumps.ranks.values() for e in dump.events if e.reported]
    if not told:
        return None
    event = min(told, key=lambda each: each.time)
    ranks = sorted(event.reported)
    summary = f"{list_ranks(ranks)} had an error in backward, told the others and went on"
    look = "look for a `try` around backward() that swallows the error, and print it there"
    return replace(_error(ranks, event, summary, look, _SKIP_IF_ANY), confidence=LIKELY)


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
