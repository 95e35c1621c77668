"""Activity of a missing rank: its line, and the kernel's view of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gradwire.recorder.verdict.dumps import Call, Dumps, RankDump, parse_stacks
from gradwire.recorder.verdict.evidence import (
    LONG_NS,
    NEVER,
    OF_WHOLE_GROUPS,
    UNCLEAR,
    Evidence,
    Finding,
    Gap,
    Kind,
    Standing,
    at_line,
    innermost,
    is_conditional,
    is_users,
    last_call,
    last_of,
    list_ranks,
    name_call,
    name_place,
    on_host,
    places_of,
    swallowing_handler,
    waits_for_others,
    was_interrupted,
)

_LOADING = "/torch/utils/data/"
Doing = tuple[str, list[str], tuple[str, ...], tuple[str, ...]]
"""Words, details, remedies and lines."""


def what_it_did(evidence: Evidence, rank: int) -> Doing:
    """Return what a missing rank was doing: words, details, remedies and lines."""
    dump = evidence.dumps.ranks[rank]
    if dump.reason == "exit":
        call = dump.exit
        lines = call.lines if call is not None else ()
        how = f"had called {call.how}{at_line(lines)}" if call is not None else "had ended"
        words = f"{how}, and ended with exit code {call.code}" if call is not None else how
        remedies = (
            "find out why its loop ended before the others': a shorter dataset, an early `break`",
            "or use join() for uneven inputs",
        )
        return words, [], remedies, tuple(places_of(lines)[:1])
    if dump.events and was_interrupted(dump.events[-1]):
        at = at_line(dump.events[-1].lines)
        remedy = "find out what sent SIGINT: Ctrl-C in a terminal, a launcher, a debugger"
        return f"was interrupted{at}", [], (remedy,), tuple(places_of(dump.events[-1].lines)[:1])
    return what_it_waited_for(dump)


def what_it_waited_for(dump: RankDump) -> Doing:
    """Return what a rank that runs was in, as in `what_it_did`."""
    where, places = innermost(dump.stack), tuple(places_of(dump.stack)[:1])
    words = f"was {where}" if where else "was in other code"
    call, children = dump.kernel.get("call"), list(dump.kernel.get("children", ()))
    if call in ("flock", "fcntl"):
        return _at_lock(words, dump.kernel, places)
    if call == "read" and dump.kernel.get("descriptor") == 0:
        words += ", waiting for input from its terminal (standard input)"
        return words, [], ("do not ask for input in a rank: pass it as an argument",), places
    if any(_LOADING in str(frame["filename"]) for frame in dump.stack):
        return _in_loader(words, children, places)
    if call == "wait" and children:
        return _for_child(words, children, places)
    remedies = (
        "find out what that line waits for or computes: a lock, an endless loop, a file system",
        "if it is slow by purpose (evaluation, a checkpoint), do it on all ranks, or set a longer "
        "timeout for the group",
    )
    return words, [], remedies, places


def _at_lock(words: str, kernel: Mapping[str, Any], places: tuple[str, ...]) -> Doing:
    holder = kernel.get("holder")
    held = f"process {holder}" if holder else "another process"
    words += f", waiting for a lock on the file {kernel.get('file', '')} that {held} holds"
    remedies = (
        f"see what {held} does: `ps -fp {holder or 'PID'}`",
        "give the lock a timeout, and release it before the next collective",
    )
    return words, [], remedies, places


def _for_child(words: str, children: Sequence[Mapping[str, Any]], places: tuple[str, ...]) -> Doing:
    blocked = [child for child in children if child.get("full pipe")]
    child = (blocked or children)[0]
    words += f", waiting for its child process {child['pid']}"
    remedy = "see what the child process does, and give the wait a timeout"
    if blocked:
        words += ", which is blocked writing to a pipe that is full"
        remedy = "read the child's output while it runs: use subprocess.run or communicate()"
    return words, [f"the child is: {child.get('command', '')}"], (remedy,), places


def _in_loader(words: str, children: Sequence[Mapping[str, Any]], places: tuple[str, ...]) -> Doing:
    """Describe a rank that waits for its data loader's workers."""
    stuck = []
    for child in children:
        stacks = parse_stacks(str(child.get("stack", ""))) if child.get("stack") else []
        frames = stacks[-1][1] if stacks else []
        if innermost(frames) and not _idle_worker(frames):
            stuck.append((child["pid"], frames))
    words += ", waiting for its data loader"
    remedy = "look at the dataset's __getitem__ and at the storage that it reads"
    if not stuck:
        return words, [], (remedy, "pass a timeout to the DataLoader"), places
    pid, frames = stuck[0]
    words += f": worker process {pid} is {innermost(frames)}"
    lines = tuple(places_of(frames)[:1])
    return words, [], ("find out what that line of the dataset waits for", remedy), lines + places


def _idle_worker(frames: Sequence[Mapping[str, Any]]) -> bool:
    """Return True if a loader's worker waits for work, in PyTorch's own loop."""
    for frame in frames:
        if is_users(frame):
            return False
        if str(frame["name"]) == "_worker_loop":
            return True
    return True


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
