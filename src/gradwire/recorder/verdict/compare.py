"""Where the ranks' collectives first differ: another call on a rank, or none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from gradwire.recorder.lines import swallowing_handler
from gradwire.recorder.verdict.dumps import Call, Dumps
from gradwire.recorder.verdict.finding import Finding, Kind, list_ranks, name_call

_TIMES = 2  # on each rank, before anything is expected


@dataclass(frozen=True)
class Gap:
    """A collective that some ranks have called, and wait in, and others have not.

    Attributes:
        group, number: Which.
        calls: Of the ranks that have called it.
        missing: Those that had not, when they wrote their dumps.
        silent: Those of which there is no dump, or one of before.
    """

    group: str
    number: int
    calls: Mapping[int, Call]
    missing: tuple[int, ...]
    silent: tuple[int, ...] = ()


def find_gaps(dumps: Dumps) -> list[Gap]:
    """In each group, the first collective that not all ranks have called; the oldest first."""
    gaps = []
    for group, ranks in dumps.groups.items():
        last = {
            rank: dump.calls[group][-1].number if dump.calls.get(group) else 0
            for rank, dump in dumps.ranks.items()
            if rank in ranks
        }
        for number, calls in dumps.calls(group).items():
            absent = [r for r in ranks if r not in calls and last.get(r, 0) < number]
            waiting = any(not call.done for call in calls.values())
            if absent and waiting:
                silent = tuple(r for r in absent if not _was_written_since(dumps, r, calls))
                missing = tuple(r for r in absent if r not in silent)
                gaps.append(Gap(group, number, calls, missing, silent))
                break
    return sorted(gaps, key=lambda gap: min(call.created for call in gap.calls.values()))


def _was_written_since(dumps: Dumps, rank: int, calls: Mapping[int, Call]) -> bool:
    """Whether there is a dump of a rank from after others had called something, or its last."""
    dump = dumps.ranks.get(rank)
    if dump is None or dump.reason == "exit":
        return dump is not None
    known = dump.taken and dumps.same_clock([rank, *calls])
    return not known or dump.taken > min(call.created for call in calls.values())


def find_mismatch(dumps: Dumps) -> tuple[Finding, int] | None:
    """The oldest collective in which ranks call different things, and when it was."""
    found: list[tuple[int, dict[int, Call], list[int]]] = []
    for group in dumps.groups:
        for recorded in dumps.calls(group).values():
            calls = _with_crashed(dumps, recorded)
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
    return _mismatch(dumps, calls, culprits), when


def _with_crashed(dumps: Dumps, calls: dict[int, Call]) -> dict[int, Call]:
    """Also what ranks called that crashed in it, by their line: Gloo ends a process that gets more
    bytes than it expects, which may be any rank's.
    """
    if all(call.done for call in calls.values()):
        return calls
    first = next(iter(calls.values()))
    found = dict(calls)
    for rank, crash in dumps.crashes.items():
        called = None if rank in calls else _call_at(dumps, crash.frames)
        if called is not None:
            found[rank] = replace(called, number=first.number, created=first.created, done=False)
    return found


def _call_at(dumps: Dumps, frames: Sequence[Mapping[str, Any]]) -> Call | None:
    """What some rank called, and ended, at a line of a stack."""
    places = {(str(frame["filename"]), int(frame["line"])) for frame in frames}
    for dump in dumps.ranks.values():
        for calls in dump.calls.values():
            for call in reversed(calls):
                if call.done and call.place in places:
                    return call
    return None


def _mismatch(dumps: Dumps, calls: Mapping[int, Call], culprits: list[int]) -> Finding:
    if not culprits:
        return _undecided(calls)
    others = [rank for rank in calls if rank not in culprits]
    mine, theirs = calls[culprits[0]], calls[others[0]]
    details = [f"rank {rank}: {name_call(call)}" for rank, call in sorted(calls.items())]
    common: dict[str, Any] = {
        "op": theirs.op,
        "group": theirs.group,
        "number": theirs.number,
        "places": tuple(dict.fromkeys(f"{c.filename}:{c.line}" for c in (mine, theirs))),
        "parameters": mine.parameters or theirs.parameters,
    }
    who = list_ranks(culprits)
    if (mine.op, mine.place) == (theirs.op, theirs.place):
        field = "size" if mine.sizes != theirs.sizes else "dtype"
        return Finding(
            Kind.MISMATCH,
            tuple(culprits),
            f"{who} called {name_call(mine)} with another {field} than "
            f"{list_ranks(others)}: {_value(mine, field)} instead of {_value(theirs, field)}",
            tuple(details),
            f"give all ranks the same {field}: look at what decides it, such as the last batch",
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
        "call the same collectives in the same order on all ranks: look for a condition on the "
        "rank, or on data that differ, and for orders of sets and dicts",
        **common,
    )


def _skipped(
    culprits: list[int], mine: Call, theirs: Call, details: list[str], common: dict[str, Any]
) -> Finding:
    who = list_ranks(culprits)
    step = f" of step {theirs.step}" if theirs.step is not None else ""
    details = [f"it went on to the {name_call(mine, number=False)}", *details]
    remedy = "look for a condition, `continue` or early `return` that is taken on this rank alone"
    handler = swallowing_handler(theirs.filename, theirs.line)
    if handler is not None:
        details.insert(0, f"that line is in a `try` whose `except` in line {handler} goes on")
        remedy = (
            f"an error was probably swallowed: let the `except` in line {handler} of "
            f"{theirs.filename} print it, and raise, or have all ranks skip the step"
        )
    return Finding(
        Kind.SKIPPED,
        tuple(culprits),
        f"{who} left out the {name_call(theirs)}{step}, which all other ranks called",
        tuple(details),
        remedy,
        **common,
    )


def _undecided(calls: Mapping[int, Call]) -> Finding:
    """As many ranks called one as the other, and nothing shows which was meant."""
    ranks, first = list(calls), next(iter(calls.values()))
    others = (call for call in calls.values() if call.what != first.what)
    other = next(others)
    return Finding(
        Kind.MISMATCH,
        (),
        f"{list_ranks(ranks)} called different things (number {first.number} of group "
        f"{first.group}), as many the one as the other: {name_call(first, number=False)}, and "
        f"{name_call(other, number=False)}",
        tuple(f"rank {rank}: {name_call(call)}" for rank, call in sorted(calls.items())),
        "see which of them was meant: look for a condition on the rank, or on data that differ",
        first.op,
        first.group,
        first.number,
        tuple(dict.fromkeys(f"{c.filename}:{c.line}" for c in (first, other))),
    )


def _culprits(dumps: Dumps, calls: Mapping[int, Call]) -> list[int]:
    """The ranks that are fewer; of as many, those that left out what always came next before."""
    groups: dict[object, list[int]] = {}
    for rank, call in sorted(calls.items()):
        groups.setdefault(call.what, []).append(rank)
    sizes = sorted(len(ranks) for ranks in groups.values())
    if len(sizes) > 1 and sizes[-1] == sizes[-2]:
        expected = _expected(dumps, next(iter(calls.values())))
        strange = [r for r, call in sorted(calls.items()) if (call.op, call.place) != expected]
        return strange if expected is not None and len(strange) < len(calls) else []
    ((common, _),) = Counter(call.what for call in calls.values()).most_common(1)
    return [rank for rank, call in sorted(calls.items()) if call.what != common]


def _elsewhere_in_program(dumps: Dumps, calls: Mapping[int, Call]) -> list[int]:
    """Of a call that failed on all ranks, the few that made it at another line than the others.

    Sizes of some collectives may differ between ranks, so that they say nothing. Nor do lines that
    went together before, as of a root and the others.
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
    """What came next on all ranks, each time, after the call before this one; None if that varied.

    A call of another size than before may be the right one, as of a last batch; so one that was
    left out alone is judged by what was before.
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
    """Whether some rank called these two lines before, one after the other."""
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
