"""Ranks that wait for each other, or in another call than the majority."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from gradwire.recorder.verdict.evidence import (
    LONG_NS,
    NEVER,
    OF_WHOLE_GROUPS,
    Evidence,
    Standing,
)
from gradwire.recorder.verdict.finding import (
    Finding,
    Kind,
    list_ranks,
    name_call,
    name_place,
    places_of,
)

_Wait = tuple[str, str, tuple[int, ...]]
"""Wait of a rank: group name ("" for a message or lock), description, ranks that it waits for."""
_RECEIVES = {"recv", "irecv", "recv_object_list"}


# -- ranks that wait for each other --------------------------------------------------------------


def find_deadlock(evidence: Evidence) -> list[Finding]:
    """Find ranks that wait for each other, in different groups, for messages or for a file lock."""
    waits = _waits(evidence)
    for rank in sorted(waits):
        path = _cycle(waits, rank)
        names = {waits[r][0] for r in path}
        if len(path) > 1 and (len(names) > 1 or "" in names):
            return [_deadlock(evidence, waits, path)]
    return _all_receive(evidence)


def _waits(evidence: Evidence) -> dict[int, _Wait]:
    dumps, waits = evidence.dumps, dict[int, _Wait]()
    by_pid = {dump.pid: rank for rank, dump in dumps.ranks.items()}
    for rank, dump in dumps.ranks.items():
        holder = dump.kernel.get("holder")
        if holder in by_pid and by_pid[holder] != rank:
            file = Path(str(dump.kernel.get("file", ""))).name
            waits[rank] = "", f"for the lock of the file {file}", (by_pid[holder],)
    for gap in evidence.gaps:
        for rank, call in gap.calls.items():
            if not call.done and rank not in waits:
                words = f"in the {name_call(call)} of group {gap.group}"
                waits[rank] = gap.group, words, gap.missing
    for rank in dumps.ranks:
        at = evidence.standing(rank)
        if rank not in waits and at is not None and at.peer is not None and at.peer >= 0:
            waits[rank] = "", at.words, (at.peer,)
    return waits


def _deadlock(evidence: Evidence, waits: Mapping[int, _Wait], path: Sequence[int]) -> Finding:
    dumps = evidence.dumps
    stands = [at for rank in path if (at := evidence.standing(rank)) is not None]
    places = [f"{at.filename}:{at.line}" for at in stands]
    why = "each in another group: they call collectives on these groups in different orders"
    remedies: tuple[str, ...] = (
        "call the groups in the same order on all ranks",
        "or wait for async work on one group before starting on the other",
    )
    locked = [rank for rank in path if "lock of the file" in waits[rank][1]]
    if locked:
        why = f"one of them for a file lock that {list_ranks(waits[locked[0]][2])} holds"
        remedies = ("release the lock before the next collective",)
        places = places_of(dumps.ranks[locked[0]].stack)[:1] + places
    elif any(not waits[rank][0] for rank in path):
        why = "each for a message of the next: no rank reaches its send"
        remedies = ("let one of two ranks send before it receives, or use batch_isend_irecv",)
    return Finding(
        Kind.DEADLOCK,
        tuple(sorted(path)),
        f"{list_ranks(path)} wait for each other, {why}",
        tuple(f"rank {r} waits {waits[r][1]} for {list_ranks(waits[r][2])}" for r in path),
        remedies,
        places=tuple(dict.fromkeys(places)),
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


def _all_receive(evidence: Evidence) -> list[Finding]:
    """Find that all ranks wait for a message: Gloo does not record from whom."""
    stands = {rank: evidence.standing(rank) for rank in evidence.dumps.ranks}
    if len(stands) < len(evidence.dumps.world) or len(stands) < 2 or evidence.gaps:
        return []
    if not all(at is not None and at.op in _RECEIVES for at in stands.values()):
        return []
    failed = [time for rank in stands if (time := evidence.fails_at(rank)) < NEVER]
    if failed and max(failed) - min(failed) > LONG_NS:
        return []  # the last one came late
    known = [at for at in stands.values() if at is not None]
    lines = sorted(
        {name_place({"filename": a.filename, "line": a.line, "name": a.op}) for a in known}
    )
    return [
        Finding(
            Kind.DEADLOCK,
            tuple(sorted(stands)),
            f"all ranks wait for a message at the same time: {', '.join(lines[:3])}",
            tuple(f"rank {r} waited {at.words}" for r, at in stands.items() if at is not None),
            ("let one of two ranks send before it receives, or use batch_isend_irecv",),
            places=tuple(dict.fromkeys(f"{a.filename}:{a.line}" for a in known)),
        )
    ]


# -- ranks in another call -----------------------------------------------------------------------


def find_elsewhere(evidence: Evidence) -> list[Finding]:
    """Find a minority of ranks in one call while all others wait in another call of the group."""
    dumps = evidence.dumps
    for gap in evidence.gaps:
        if gap.silent or any(dumps.ranks[r].waits_in(gap.group) for r in gap.missing):
            continue  # a rank still in an earlier collective of the group is not elsewhere
        stands = {rank: evidence.standing(rank) for rank in (*gap.calls, *gap.missing)}
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
        of_group = at.op in OF_WHOLE_GROUPS or set(most) == set(gap.calls)
        if len(classes) == 2 and 2 * len(most) > len(ranks) and of_group:
            return [_elsewhere(stands, sorted(set(stands) - set(most)), most)]
    return []


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
        (
            "make the same calls on all ranks, including new_group() and barriers",
            "look for a condition on the rank before these lines",
        ),
        places=(f"{mine.filename}:{mine.line}", f"{theirs.filename}:{theirs.line}"),
    )
