"""Rules about ranks that others wait for: they are in other code, have ended, or wait as well."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gradwire.recorder.lines import swallowing_handler
from gradwire.recorder.verdict.compare import Gap
from gradwire.recorder.verdict.dumps import Call, Dumps
from gradwire.recorder.verdict.finding import Finding, Kind, list_ranks, name_call
from gradwire.recorder.verdict.standing import (
    OF_WHOLE_GROUPS,
    Standing,
    is_primary,
    standing_of,
    was_interrupted,
)
from gradwire.recorder.verdict.wording import (
    at_line,
    counts_of,
    innermost,
    last_call,
    last_of,
    places_of,
    states_of,
)

_NOTICED_NS = 1_000_000_000
"""Upper bound on the time until a waiting rank notices that a process has ended."""

_Wait = tuple[str, str, tuple[int, ...]]
"""Wait of a rank: group name ("" for a message), description, and ranks that it waits for."""


def find_deadlock(dumps: Dumps, gaps: Sequence[Gap]) -> Finding | None:
    """Find ranks that wait for each other, in different groups or for messages."""
    waits = _waits(dumps, gaps)
    for rank in sorted(waits):
        path = _cycle(waits, rank)
        names = {waits[r][0] for r in path}
        if path and (len(names) > 1 or "" in names):
            return _deadlock(dumps, waits, path)
    return None


def _waits(dumps: Dumps, gaps: Sequence[Gap]) -> dict[int, _Wait]:
    waits: dict[int, _Wait] = {}
    for gap in gaps:
        for rank, call in gap.calls.items():
            if not call.done and rank not in waits:
                words = f"in the {name_call(call)} of group {gap.group}"
                waits[rank] = gap.group, words, gap.missing
    for rank in dumps.ranks:
        at = standing_of(dumps, rank)
        if rank not in waits and at is not None and at.peer is not None and at.peer >= 0:
            waits[rank] = "", at.words, (at.peer,)
    return waits


def _deadlock(dumps: Dumps, waits: Mapping[int, _Wait], path: Sequence[int]) -> Finding:
    stands = [at for rank in path if (at := standing_of(dumps, rank)) is not None]
    messages = any(not waits[rank][0] for rank in path)
    why = "each in another group: they call collectives on these groups in different orders"
    remedy = (
        "call the groups in the same order on all ranks, or wait for async work on one group "
        "before starting on the other"
    )
    if messages:
        why = "each for a message of the next: no rank reaches its send"
        remedy = "let one of two ranks send before it receives, or use batch_isend_irecv"
    return Finding(
        Kind.DEADLOCK,
        tuple(sorted(path)),
        f"{list_ranks(path)} wait for each other, {why}",
        tuple(f"rank {r} waits {waits[r][1]} for {list_ranks(waits[r][2])}" for r in path),
        remedy,
        places=tuple(dict.fromkeys(f"{at.filename}:{at.line}" for at in stands)),
    )


def _cycle(waits: Mapping[int, _Wait], start: int) -> list[int]:
    """Return ranks that each wait for the next, the last for the first; empty if there are none."""
    path: list[int] = []
    rank = start
    while rank not in path:
        path.append(rank)
        following = [r for r in waits[rank][2] if r in waits]
        if not following:
            return []
        rank = following[0]
    return path[path.index(rank) :]


def find_elsewhere(dumps: Dumps, gaps: Sequence[Gap]) -> Finding | None:
    """Find a minority of ranks in one call while all others wait in another call of the group."""
    for gap in gaps:
        if gap.silent or any(dumps.ranks[r].waits_in(gap.group) for r in gap.missing):
            continue  # a rank still in an earlier collective of the group is not elsewhere
        stands = {rank: standing_of(dumps, rank) for rank in (*gap.calls, *gap.missing)}
        ranks = dumps.groups[gap.group]
        if any(at is None or not at.op for at in stands.values()) or len(stands) < len(ranks):
            continue
        classes: dict[tuple[str, str, int], list[int]] = {}
        for rank, at in stands.items():
            assert at is not None
            classes.setdefault((at.op, at.filename, at.line), []).append(rank)
        most = max(classes.values(), key=len)
        at = stands[most[0]]
        assert at is not None
        if len(classes) == 2 and 2 * len(most) > len(ranks) and _is_of_group(gap, most, at):
            return _elsewhere(stands, sorted(set(stands) - set(most)), most)
    return None


def find_not_in_group_call(dumps: Dumps) -> Finding | None:
    """Find the one rank that is not in a call in which all others wait, such as `new_group`."""
    stands = {rank: standing_of(dumps, rank) for rank in dumps.ranks}
    away = [rank for rank, at in stands.items() if at is None]
    there = {rank: at for rank, at in stands.items() if at is not None}
    if len(away) != 1 or len(there) < 2 or len(stands) < len(dumps.world):
        return None
    at = next(iter(there.values()))
    if (
        at.op not in OF_WHOLE_GROUPS
        or len({(o.op, o.filename, o.line) for o in there.values()}) > 1
    ):
        return None
    dump = dumps.ranks[away[0]]
    ended = dump.reason == "exit"
    where = "had ended" if ended else f"was {innermost(dump.stack) or 'in other code'}"
    return Finding(
        Kind.FINISHED if ended else Kind.MISSING,
        tuple(away),
        f"rank {away[0]} {where}, while {list_ranks(list(there))} waited {at.words}",
        (f"rank {away[0]}: {last_call(dumps, away[0], None)}",),
        "make this call on all ranks: look for a condition on the rank",
        places=(f"{at.filename}:{at.line}",),
    )


def _is_of_group(gap: Gap, ranks: Sequence[int], at: Standing) -> bool:
    return at.op in OF_WHOLE_GROUPS or set(ranks) == set(gap.calls)


def _elsewhere(
    stands: Mapping[int, Standing | None], few: Sequence[int], most: Sequence[int]
) -> Finding:
    mine, theirs = stands[few[0]], stands[most[0]]
    assert mine is not None
    assert theirs is not None
    return Finding(
        Kind.MISMATCH,
        tuple(few),
        f"{list_ranks(few)} waited {mine.words}, and {list_ranks(most)} {theirs.words}",
        (),
        "make the same calls on all ranks, including new_group() and barriers: look for a "
        "condition on the rank",
        places=(f"{mine.filename}:{mine.line}", f"{theirs.filename}:{theirs.line}"),
    )


def find_missing(dumps: Dumps, gaps: Sequence[Gap]) -> Finding | None:
    """Find ranks that have not called a collective in which others wait, and that do not wait."""
    for gap in gaps:
        away = [
            r for r in gap.missing if standing_of(dumps, r) is None and not _is_victim(dumps, r)
        ]
        if away:
            return _missing(dumps, gap, away)
        if not gap.missing and len(gap.silent) == 1:
            return _silent(dumps, gap, gap.silent[0])
    return None


def _may_wait_elsewhere(dumps: Dumps, rank: int, group: str) -> bool:
    """Return True if a rank without a dump belongs to other groups, in which it may wait."""
    return any(rank in ranks for name, ranks in dumps.groups.items() if name != group)


def _is_victim(dumps: Dumps, rank: int) -> bool:
    """Return True if another rank's failure explains all errors of a rank."""
    dump = dumps.ranks[rank]
    if not dump.events or any(is_primary(event, dump) for event in dump.events):
        return False
    interrupted = [r for r, d in dumps.ranks.items() if d.events and was_interrupted(d.events[-1])]
    return interrupted != [rank]  # an interrupt of all ranks hits them anywhere


def _silent(dumps: Dumps, gap: Gap, rank: int) -> Finding:
    call = next(iter(gap.calls.values()))
    state = states_of(dumps).get(rank)
    return Finding(
        Kind.MISSING,
        () if _may_wait_elsewhere(dumps, rank, gap.group) else (rank,),
        f"rank {rank} did not call the {name_call(call)} of group {gap.group}, in "
        f"which {_who_waits(gap)}, and left no dump",
        (f"its process is {state}",) if state else (),
        "it died, hangs in C code that holds the GIL, or its host is unreachable: check its "
        "process (py-spy dump --pid) and its log",
        **_of(call),
    )


def _missing(dumps: Dumps, gap: Gap, away: Sequence[int]) -> Finding:
    call = next(iter(gap.calls.values()))
    first = dumps.ranks[away[0]]
    ended = first.reason == "exit"
    interrupted = bool(first.events) and was_interrupted(first.events[-1])
    where = innermost(first.stack)
    at = "had ended" if ended else f"was {where}" if where else "was in other code"
    if interrupted:
        at = f"was interrupted{at_line(first.events[-1].lines)}"
    details = [f"rank {r}: {last_call(dumps, r, gap.group)}" for r in away]
    details += [f"rank {r} got {last_of(dumps.ranks[r])}" for r in away if dumps.ranks[r].events]
    details += counts_of(dumps, gap)
    handler = swallowing_handler(call.filename, call.line) if ended else None
    remedy = (
        "find out why its loop ended before the others': a shorter dataset, an early "
        "`break`; or use model.join() for uneven inputs"
        if ended
        else "find out what that line waits for or computes: an endless loop, a lock, a data "
        "loader, a file system; `py-spy dump --pid` shows the live stack"
    )
    if interrupted:
        remedy = "find out what sent SIGINT: Ctrl-C in a terminal, a launcher, a debugger"
    if handler is not None:
        details.append(f"line {call.line} is in a `try` whose `except` in line {handler} continues")
    return Finding(
        Kind.ERROR if interrupted else Kind.FINISHED if ended else Kind.MISSING,
        tuple(away),
        f"{list_ranks(away)} did not call the {name_call(call)} of group {gap.group}, in which "
        f"{_who_waits(gap)}; {'it' if len(away) == 1 else f'rank {away[0]}'} {at}",
        tuple(details),
        remedy,
        **_of(call) | {"places": (*places_of(first.stack)[:1], f"{call.filename}:{call.line}")},
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
    }


def find_late(dumps: Dumps) -> Finding | None:
    """Find ranks whose error came long after all others had given up waiting and ended.

    They were not waiting when the others left, which would have ended their wait as well. This
    finds a missing rank even if no rank lacks a collective: with messages, or if the rank made the
    call in the end.
    """
    ranks = sorted(dumps.ranks, key=lambda rank: _failed_at(dumps, rank))
    waited = all(d.events and not is_primary(d.events[-1], d) for d in dumps.ranks.values())
    if not waited or len(ranks) < len(dumps.world) or not dumps.same_clock({*ranks}):
        return None
    for count in range(1, len(ranks)):
        ended = max(dumps.ranks[rank].taken for rank in ranks[:count])
        if _failed_at(dumps, ranks[count]) > ended + _NOTICED_NS:
            return _came_late(dumps, sorted(ranks[:count]), sorted(ranks[count:]))
    return None


def _failed_at(dumps: Dumps, rank: int) -> int:
    events = dumps.ranks[rank].events
    return events[-1].time if events else 0


def _came_late(dumps: Dumps, first: list[int], late: list[int]) -> Finding:
    event = dumps.ranks[late[0]].events[-1]
    seconds = (event.time - max(_failed_at(dumps, rank) for rank in first)) * 1e-9
    call = f" called {event.call}" if event.call else " arrived"
    who = "it" if len(late) == 1 else f"rank {late[0]}"
    return Finding(
        Kind.MISSING,
        tuple(late),
        f"{list_ranks(late)} did not arrive while {list_ranks(first)} waited; {who}{call}"
        f"{at_line(event.lines)} {seconds:.1f} s after they had failed",
        tuple(
            [f"rank {r}: {last_of(dumps.ranks[r])}" for r in first[:6]]
            + [f"rank {r}: {last_call(dumps, r, None)}" for r in late[:2] if dumps.ranks[r].calls]
        ),
        "find out what it does before that line: a long evaluation, a checkpoint, a data loader; "
        "or set a longer timeout for the group",
        places=tuple(places_of(event.lines)[:1]),
    )
