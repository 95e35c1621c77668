"""Ranks that wait for each other or in another call, and ranks that others wait for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from gradwire.recorder.verdict.dumps import Frame, RankDump, parse_stacks
from gradwire.recorder.verdict.evidence import (
    LIKELY,
    LONG_NS,
    NEVER,
    OF_WHOLE_GROUPS,
    UNCLEAR,
    Evidence,
    Finding,
    Gap,
    Kind,
    at_line,
    by_ranks,
    for_how_long,
    is_users,
    list_ranks,
    name_call,
    place_of,
    unique,
    waits_for_others,
)

_RECEIVES = {"recv", "irecv", "recv_object_list"}
_LOADING = "/torch/utils/data/"
_FOR_MESSAGES = ("let one of two ranks send before it receives, or use batch_isend_irecv",)
_FOR_GIL: tuple[str, ...] = (
    "see what that line calls: an extension that does not release the GIL blocks all threads",
)
_FOR_SILENT = ("see its log, and whether its process runs and its host can be reached",)
_FOR_UNEVEN = (
    "count the steps of each rank: `len(loader)`, `drop_last` or an early `break` determine it",
    "use gradwire's or PyTorch's join() for uneven inputs",
)


# -- ranks that wait for each other --------------------------------------------------------------


class _Wait(NamedTuple):
    """Wait of a rank: group ("" for a message or lock), words, line, ranks that it waits for."""

    group: str
    words: str
    place: str
    ranks: Sequence[int]


def find_deadlock(evidence: Evidence) -> Finding | None:
    """Find ranks that wait for each other, in different groups, for messages or for a file lock."""
    waits = _waits(evidence)
    ahead = {rank: _waits_for(waits, rank) for rank in waits}
    for rank in sorted(waits):
        circle = {r: waits[r] for r in sorted(ahead[rank]) if rank in ahead[r]}
        groups = {wait.group for wait in circle.values()}
        locked = {r: wait for r, wait in circle.items() if "lock of the file" in wait.words}
        # a rank that waits for a message of one in a collective may be right, and so may the other
        if not circle or ((len(groups) == 1) == ("" not in groups) and not locked):
            continue
        named: Sequence[int] = ()  # of ranks that wait for messages, any may be where it should
        if locked:
            # one that waits for a lock itself may have got this one just now
            named = sorted({wait.ranks[0] for wait in locked.values()} - locked.keys())
            why = f"for a file lock that {list_ranks(named) if named else 'one of them'} holds"
            remedies = ("release the lock before the next collective",)
        elif "" in groups:
            why = "each for a message: no rank reaches its send"
            remedies = _FOR_MESSAGES
        else:
            named = _minority(evidence, circle)
            why = "in different groups: they call collectives on these groups in different orders"
            remedies = ("call the groups in the same order on all ranks",)
        return Finding(
            Kind.DEADLOCK,
            named,
            f"{list_ranks([*circle])} wait for each other, {why}",
            remedies,
            by_ranks({r: f"waited {wait.words}" for r, wait in circle.items()}),
            unique([w.place for w in (*locked.values(), *circle.values()) if w.place]),
        )
    return None


def _waits(evidence: Evidence) -> dict[int, _Wait]:
    dumps, waits = evidence.dumps, dict[int, _Wait]()
    by_pid = {dump.pid: rank for rank, dump in dumps.ranks.items()}
    for rank, dump in dumps.ranks.items():
        holder = by_pid.get(int(dump.kernel.get("holder") or -1))
        if holder not in (None, rank):
            name = Path(str(dump.kernel.get("file", ""))).name
            words = f"for the lock of the file {name}, which rank {holder} holds"
            waits[rank] = _Wait("", words, "".join(place_of(dump.stack)), [holder])
    for gap in evidence.gaps:
        words = f"of group {gap.group} for {list_ranks(gap.missing)}"
        for rank, call in gap.calls.items():
            if not call.done and rank not in waits:
                waits[rank] = _Wait(
                    gap.group, f"in the {name_call(call)} {words}", call.place, gap.missing
                )
    stands = {rank: at for rank, at in evidence.standings.items() if at is not None}
    # Gloo does not record from whom; if one failed long after the others, it had come late
    failed = [time for rank in stands if (time := evidence.fails_at(rank)) < NEVER]
    all_receive = [at.op in _RECEIVES for at in stands.values()] == [True] * len(dumps.world)
    all_receive &= not evidence.gaps and max(failed, default=0) - min(failed, default=0) <= LONG_NS
    for rank, at in stands.items():
        peers = [at.peer] if at.peer is not None and at.peer >= 0 else []
        if rank not in waits and (peers or all_receive):
            waits[rank] = _Wait("", at.words, at.place, peers or [r for r in stands if r != rank])
    return waits


def _waits_for(waits: Mapping[int, _Wait], rank: int) -> set[int]:
    """Return the waiting ranks for which a rank waits, directly or through others."""
    found, left = set[int](), [rank]
    while left:
        more = (waits.keys() & waits[left.pop()].ranks) - found
        found |= more
        left += more
    return found


def _minority(evidence: Evidence, waits: Mapping[int, _Wait]) -> list[int]:
    """Return ranks that wait in another group than most that could; empty if there are no most."""
    counts = Counter(wait.group for wait in waits.values())
    group, count = counts.most_common(1)[0]
    could = set.intersection(*({*evidence.dumps.groups.get(each, ())} for each in counts))
    if 2 * count <= len(could) or not could.issuperset(waits):
        return []  # a rank of one group only shows nothing of their order
    return [rank for rank, wait in waits.items() if wait.group != group]


# -- ranks in another call, or in none -----------------------------------------------------------


def find_elsewhere(evidence: Evidence) -> Finding | None:
    """Find a minority of ranks in one call while all others wait in another call of the group."""
    dumps = evidence.dumps
    for gap in evidence.gaps:
        open_ = [call.group for rank in gap.missing for call in dumps.ranks[rank].pending]
        if gap.silent or gap.group in open_:
            continue  # a rank still in an earlier collective of the group is not elsewhere
        stands = {rank: evidence.standings.get(rank) for rank in (*gap.calls, *gap.missing)}
        known = {rank: at for rank, at in stands.items() if at is not None and at.op}
        size = len(dumps.groups[gap.group])
        if len(known) < max(size, len(stands)):
            continue
        sites = Counter(at.site for at in known.values()).most_common()
        most = [rank for rank, at in known.items() if at.site == sites[0][0]]
        of_group = known[most[0]].op in OF_WHOLE_GROUPS or {*most} == {*gap.calls}
        few = sorted({*stands} - {*most})
        if len(sites) != 2 or 2 * len(most) <= size or not of_group:
            continue
        if any(known[rank].op in _RECEIVES for rank in few):
            continue  # one of the others may not have sent the message
        if known[most[0]].op in ("init_process_group", "new_group"):
            continue  # ranks outside of a group leave its new_group at once
        mine, theirs = known[few[0]], known[most[0]]
        return Finding(
            Kind.MISMATCH,
            few,
            f"{list_ranks(few)} waited {mine.words}, and {list_ranks(most)} {theirs.words}",
            ("look for a condition on the rank before these lines",),
            places=(mine.place, theirs.place),
            confidence=LIKELY,
        )
    return None


def _alone(evidence: Evidence) -> Finding | None:
    """Find the rank that waits for no other, while all others wait in one call or have given up."""
    dumps, stands = evidence.dumps, evidence.standings
    there = {rank: at for rank, at in stands.items() if at is not None}
    away = [rank for rank in stands if rank not in there]
    if len(away) != 1 or not there or len(stands) < len(dumps.world):
        return None
    at, gave_up = next(iter(there.values())), evidence.gave_up
    if gave_up == NEVER:
        sites = {each.site for each in there.values()}
        known = len(sites) == 1 < len(there) and at.op in OF_WHOLE_GROUPS
    else:  # else, it may have waited, unseen
        known = bool(dumps.ranks[away[0]].stack)
        known |= gave_up + LONG_NS < evidence.fails_at(away[0]) < NEVER
    if not known:
        return None
    doing = _what_it_did(evidence, away[0])
    return Finding(
        Kind.FINISHED if evidence.had_ended(away[0]) else Kind.MISSING,
        away,
        f"{list_ranks(away)} {doing.words}, while {list_ranks(list(there))} waited {at.words}",
        ("make this call on all ranks: look for a condition on the rank", *doing.remedies)[:3],
        [*doing.details, *by_ranks({rank: evidence.last_call(rank) for rank in away})],
        (*doing.places, at.place),
        confidence=LIKELY,
    )


# -- missing ranks -------------------------------------------------------------------------------


def find_missing(evidence: Evidence) -> Finding | None:
    """Find ranks that have not made a call in which others wait, and that do not wait."""
    for gap in evidence.gaps:
        away = [
            rank
            for rank in gap.missing
            if evidence.standings[rank] is None and not evidence.is_victim(rank)
        ]
        ended = [rank for rank in away if evidence.had_ended(rank)]
        if ended and len(ended) == len(away):
            doing = _what_it_did(evidence, ended[0])
            return _uneven(evidence, gap, ended) or _missing(evidence, gap, ended, doing)
        if away:
            away = [rank for rank in away if rank not in ended]
            return _missing(evidence, gap, away, _what_it_did(evidence, away[0]))
        silent = _silent_culprits(evidence, gap) if not gap.missing else []
        if silent:
            return _silent(evidence, gap, silent)
    return _alone(evidence)


def _uneven(evidence: Evidence, gap: Gap, ended: list[int]) -> Finding | None:
    """Return a finding about ranks that made different numbers of calls; None if some left."""
    victims = [rank for rank in gap.missing if evidence.is_victim(rank)]
    waiting, call = sorted({*gap.calls, *victims}), gap.call
    if len(ended) < len(waiting):
        return None
    what, few = f"the {name_call(call)} of group {gap.group}", list_ranks(ended)
    tied = len(ended) == len(waiting)
    summary = f"{list_ranks(waiting)} made one more call than {few}, which had ended: {what}"
    summary += "; the records do not show which number is right" if tied else ""
    return Finding(
        Kind.MISMATCH,
        () if tied else waiting,
        summary,
        _FOR_UNEVEN,
        places=(call.place,),
        time=call.created,
        confidence=UNCLEAR if tied else LIKELY,
    )


def _missing(evidence: Evidence, gap: Gap, away: list[int], doing: _Doing) -> Finding:
    call, ranks = gap.call, evidence.dumps.ranks
    about = by_ranks({rank: evidence.last_call(rank, gap.group) for rank in away})
    failed = [rank for rank in away if rank in ranks and ranks[rank].events]
    about += by_ranks({rank: f"got {evidence.last_error(rank)}" for rank in failed})
    came, late = [evidence.arrivals.get((r, gap.group, gap.number), 0) for r in away], ""
    if all(came):
        after = for_how_long(min(came) - max(each.created for each in gap.calls.values()))
        late = f", and came {after} after {list_ranks(list(gap.calls))}, which had given up"
    who = "it" if len(away) == 1 else f"rank {away[0]}"
    # a few that left out what most still do may be the cause
    named = away if len(away) == 1 or len(away) < len(gap.calls) else []
    waiting = f"{list_ranks(list(gap.calls))} wait{'s' if len(gap.calls) == 1 else ''}"
    what = f"the {name_call(call)} of group {gap.group}"
    return Finding(
        Kind.FINISHED if evidence.had_ended(away[0]) else Kind.MISSING,
        named,
        f"{list_ranks(away)} did not call {what}, in which {waiting}; {who} {doing.words}{late}",
        doing.remedies,
        (*doing.details, *about),
        (*doing.places, call.place),
        call.parameters,
        call.created,
        confidence=LIKELY if named else UNCLEAR,
    )


def _silent_culprits(evidence: Evidence, gap: Gap) -> list[int]:
    """Return ranks of a gap that wrote no dump: they run no Python, or nothing is known of them."""
    stacks = evidence.dumps.stacks
    frozen = [
        rank
        for rank in gap.silent
        if evidence.stopped_beating(rank) and not waits_for_others(stacks.get(rank, ()))
    ]
    if not frozen and len(gap.silent) == 1 and evidence.standing(gap.silent[0]) is None:
        return gap.silent
    return frozen


def _silent(evidence: Evidence, gap: Gap, ranks: list[int]) -> Finding:
    dumps, rank = evidence.dumps, ranks[0]
    state, stack, trace = evidence.states.get(rank), dumps.stacks.get(rank), evidence.trace(rank)
    known = stack is not None or evidence.stopped_beating(rank)
    if not stack:
        stack = trace.stack if known and trace is not None else []
    others = any(rank in of for name, of in dumps.groups.items() if name != gap.group)
    words, remedies = f"runs no Python code{at_line(stack)}: C code holds the GIL", _FOR_GIL
    if not known:
        words, remedies = "left no dump", _FOR_SILENT
    details = [f"its process is {state}"] if state else []
    finding = _missing(evidence, gap, ranks, _Doing(words, remedies, place_of(stack), details))
    named = () if others else ranks
    return finding if known else replace(finding, ranks=named, confidence=UNCLEAR)


# -- what a missing rank does --------------------------------------------------------------------


class _Doing(NamedTuple):
    """Activity of a rank."""

    words: str
    remedies: tuple[str, ...]
    places: Sequence[str] = ()
    details: Sequence[str] = ()


def _what_it_did(evidence: Evidence, rank: int) -> _Doing:
    """Return what a missing rank was doing."""
    dump = evidence.dumps.ranks[rank]
    if evidence.had_ended(rank):
        call = dump.exit
        lines = call.lines if call is not None else []
        words = f"had called {call.how}{at_line(lines)}" if call is not None else "had ended"
        words += f", and ended with exit code {call.code}" if call is not None else ""
        return _Doing(words, _FOR_UNEVEN, place_of(lines))
    doing = _what_it_waited_for(dump)
    words, places = doing.words, doing.places
    remedies: tuple[str, ...] = doing.remedies
    stack = evidence.dumps.stacks.get(rank)
    if stack and dump.stack is stack:
        words += ", and did not answer: C code held the GIL, or it got no CPU"
        remedies = _FOR_GIL
    for event in dump.events:
        if event.kind == "thread" and event.time <= evidence.gave_up:
            words += f", after another thread had ended with {event.type}{at_line(event.lines)}: "
            words += event.text(200)
            remedies = ("see why that thread failed: the main thread may wait for it",)
            places = [*places, *place_of(event.lines)]
            break
    return _Doing(words, remedies, places, doing.details)


def _what_it_waited_for(dump: RankDump) -> _Doing:
    """Return what a rank that runs is in: its line, and the kernel's view of it."""
    kernel, places, details = dump.kernel, place_of(dump.stack), list[str]()
    words = f"was{at_line(dump.stack) or ' in other code'}"
    call, children = kernel.get("call"), list(kernel.get("children", ()))
    remedies: tuple[str, ...] = (
        "find out what that line waits for or computes: a lock, an endless loop, a file system",
        "if it is slow by purpose (evaluation, a checkpoint), do it on all ranks, or set a longer "
        "timeout for the group",
    )
    if call in ("flock", "fcntl"):
        holder = kernel.get("holder")
        held = f"process {holder}" if holder else "another process"
        words += f", waiting for a lock on the file {kernel.get('file', '')} that {held} holds"
        remedies = (
            f"see what {held} does: `ps -fp {holder or 'PID'}`",
            "give the lock a timeout, and release it before the next collective",
        )
    elif kernel.get("full pipe"):
        words += ", blocked writing to a pipe that is full"
        remedies = ("see who should read from that pipe, and let it do so while this rank writes",)
    elif call == "read" and kernel.get("descriptor") == 0:
        words += ", waiting for input from its terminal (standard input)"
        remedies = ("do not ask for input in a rank: pass it as an argument",)
    elif any(_LOADING in str(frame["filename"]) for frame in dump.stack):
        words += ", waiting for its data loader"
        look = "look at the dataset's __getitem__ and at the storage that it reads"
        remedies = (look, "pass a timeout to the DataLoader")
        child, frames = _busy_child(children)
        if frames:
            words += f": worker process {child['pid']} is{at_line(frames)}"
            remedies = ("find out what that line of the dataset waits for", look)
            places = place_of(frames) + places
    elif call == "wait" and children:
        blocked = [child for child in children if child.get("full pipe")]
        child, frames = (blocked[0], []) if blocked else _busy_child(children)
        words += f", waiting for its child process {child['pid']}{at_line(frames)}"
        places = place_of(frames) + places
        details = [f"the child is: {child.get('command', '')}"]
        remedies = ("see what the child process does, and give the wait a timeout",)
        if blocked:
            words += ", which is blocked writing to a pipe that is full"
            remedies = ("read its output while it runs: use subprocess.run or communicate()",)
    return _Doing(words, remedies, places, details)


def _busy_child(children: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], Sequence[Frame]]:
    """Return a child process that is in the user's code, with its stack, or else the first one."""
    for child in children:
        stacks = parse_stacks(str(child.get("stack", ""))) if child.get("stack") else []
        if stacks and at_line(stacks[-1][1]) and not _is_idle_worker(stacks[-1][1]):
            return child, stacks[-1][1]
    return (children[0] if children else {}), []


def _is_idle_worker(frames: Sequence[Frame]) -> bool:
    """Return True if a loader's worker waits for work, in PyTorch's own loop."""
    for frame in frames:
        if is_users(frame) or str(frame["name"]) == "_worker_loop":
            return not is_users(frame)
    return True
