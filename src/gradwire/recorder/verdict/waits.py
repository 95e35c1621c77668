"""Ranks that wait for each other or in another call, and ranks that others wait for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from gradwire.recorder.verdict.dumps import Call, Frame, RankDump, parse_stacks
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
    is_conditional,
    is_users,
    list_ranks,
    name_call,
    place_of,
    swallowing_handler,
    unique,
    waits_for_others,
    was_interrupted,
)

_RECEIVES = {"recv", "irecv", "recv_object_list"}
_LOADING = "/torch/utils/data/"
_STAYS_NS = 1_000_000_000  # a failed process waits for others' dumps, after it has written its own
_FOR_MESSAGES = ("let one of two ranks send before it receives, or use batch_isend_irecv",)
_FOR_GIL = (
    "see what that line calls: an extension that does not release the GIL blocks all threads",
)
_FOR_LATE = (
    "find out what it does before that line: a long evaluation, a checkpoint, a data loader",
    "or set a longer timeout for the group",
)
_FOR_UNEVEN = (
    "count the steps of each rank: `len(loader)`, the sampler and `drop_last` determine it",
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
    for rank in sorted(waits):
        path = _cycle(waits, rank)
        names = {waits[r].group for r in path}
        if len(path) < 2 or (len(names) == 1 and "" not in names):
            continue
        why = "each in another group: they call collectives on these groups in different orders"
        remedies: tuple[str, ...] = (
            "call the groups in the same order on all ranks",
            "or wait for async work on one group before starting on the other",
        )
        locked = [waits[r] for r in path if "lock of the file" in waits[r].words]
        if locked:
            why = f"one of them for a file lock that {list_ranks(locked[0].ranks)} holds"
            remedies = ("release the lock before the next collective",)
        elif "" in names:
            why = "each for a message of the next: no rank reaches its send"
            remedies = _FOR_MESSAGES
        return Finding(
            Kind.DEADLOCK,
            sorted(path),
            f"{list_ranks(path)} wait for each other, {why}",
            remedies,
            [f"rank {r} waits {waits[r].words} for {list_ranks(waits[r].ranks)}" for r in path],
            unique([w.place for w in (*locked, *(waits[r] for r in path)) if w.place]),
        )
    return _all_receive(evidence)


def _waits(evidence: Evidence) -> dict[int, _Wait]:
    dumps, waits = evidence.dumps, dict[int, _Wait]()
    for rank, dump in dumps.ranks.items():
        holder = _lock_holder(evidence, dump)
        if holder not in (None, rank):
            words = f"for the lock of the file {Path(str(dump.kernel.get('file', ''))).name}"
            waits[rank] = _Wait("", words, "".join(place_of(dump.stack)), [holder])
    for gap in evidence.gaps:
        for rank, call in gap.calls.items():
            if not call.done and rank not in waits:
                words = f"in the {name_call(call)} of group {gap.group}"
                waits[rank] = _Wait(gap.group, words, call.place, gap.missing)
    for rank, at in evidence.standings.items():
        if rank not in waits and at is not None and at.peer is not None and at.peer >= 0:
            waits[rank] = _Wait("", at.words, at.place, [at.peer])
    return waits


def _lock_holder(evidence: Evidence, dump: RankDump) -> int | None:
    """Return the rank that holds the file lock for which a rank waits."""
    by_pid = {other.pid: rank for rank, other in evidence.dumps.ranks.items()}
    return by_pid.get(int(dump.kernel.get("holder") or -1))


def _cycle(waits: Mapping[int, _Wait], start: int) -> list[int]:
    """Return ranks that each wait for the next, the last for the first; empty if there are none."""
    path: list[int] = []
    rank = start
    while rank not in path:
        path.append(rank)
        following = [r for r in waits[rank].ranks if r in waits]
        if not following:
            return []
        rank = following[0]
    return path[path.index(rank) :]


def _all_receive(evidence: Evidence) -> Finding | None:
    """Find that all ranks wait for a message: Gloo does not record from whom."""
    stands = {r: at for r, at in evidence.standings.items() if at and at.op in _RECEIVES}
    if len(stands) < max(2, len(evidence.dumps.world)) or evidence.gaps:
        return None
    failed = [time for rank in stands if (time := evidence.fails_at(rank)) < NEVER]
    if failed and max(failed) - min(failed) > LONG_NS:
        return None  # the last one came late
    lines = unique(sorted(at.words.removeprefix(f"in {at.op} ") for at in stands.values()))
    return Finding(
        Kind.DEADLOCK,
        sorted(stands),
        f"all ranks wait for a message at the same time: {', '.join(lines[:3])}",
        _FOR_MESSAGES,
        [f"rank {rank} waited {at.words}" for rank, at in stands.items()],
        unique([at.place for at in stands.values()]),
    )


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
        classes = _classes(known)
        most = max(classes.values(), key=len)
        of_group = known[most[0]].op in OF_WHOLE_GROUPS or {*most} == {*gap.calls}
        few = sorted({*stands} - {*most})
        if len(classes) != 2 or 2 * len(most) <= size or not of_group:
            continue
        if any(known[rank].op in _RECEIVES for rank in few):
            continue  # one of the others may not have sent the message
        mine, theirs = known[few[0]], known[most[0]]
        return Finding(
            Kind.MISMATCH,
            few,
            f"{list_ranks(few)} waited {mine.words}, and {list_ranks(most)} {theirs.words}",
            (
                "make the same calls on all ranks, including new_group() and barriers",
                "look for a condition on the rank before these lines",
            ),
            places=(mine.place, theirs.place),
        )
    return None


def find_not_in_group_call(evidence: Evidence) -> Finding | None:
    """Find the one rank that is not in a call in which all others wait, such as `new_group`."""
    stands = evidence.standings
    there = {rank: at for rank, at in stands.items() if at is not None}
    away = [rank for rank in stands if rank not in there]
    if len(away) != 1 or len(there) < 2 or len(stands) < len(evidence.dumps.world):
        return None
    at = next(iter(there.values()))
    if at.op not in OF_WHOLE_GROUPS or len(_classes(there)) > 1:
        return None
    doing = _what_it_did(evidence, away[0])
    return Finding(
        Kind.FINISHED if evidence.ended(away[0]) else Kind.MISSING,
        away,
        f"rank {away[0]} {doing.words}, while {list_ranks(list(there))} waited {at.words}",
        ("make this call on all ranks: look for a condition on the rank", *doing.remedies)[:3],
        (evidence.last_call(away[0]), *doing.details),
        (*doing.places, at.place),
    )


def _classes(stands: Mapping[int, Standing]) -> dict[tuple[str, str], list[int]]:
    classes: dict[tuple[str, str], list[int]] = {}
    for rank, at in stands.items():
        classes.setdefault(at.site, []).append(rank)
    return classes


# -- missing ranks -------------------------------------------------------------------------------


def find_missing(evidence: Evidence) -> Finding | None:
    """Find ranks that have not called a collective in which others wait, and that do not wait."""
    for gap in evidence.gaps:
        away = [
            rank
            for rank in gap.missing
            if evidence.standings[rank] is None and not evidence.is_victim(rank)
        ]
        ended = [rank for rank in away if evidence.ended(rank)]
        if ended and len(ended) == len(away):
            return _uneven(evidence, gap, ended) or _missing(evidence, gap, ended)
        if away:
            return _missing(evidence, gap, [r for r in away if r not in ended])
        silent = _silent_culprits(evidence, gap) if not gap.missing else []
        if silent:
            return _silent(evidence, gap, silent)
    return None


def _uneven(evidence: Evidence, gap: Gap, ended: list[int]) -> Finding | None:
    """Return a finding about ranks that made different numbers of calls; None if some left."""
    exits = [evidence.dumps.ranks[rank].exit for rank in ended]
    lines = [place_of(exit_.lines) if exit_ is not None else [] for exit_ in exits]
    left = all(line and is_conditional(line[0]) for line in lines)
    victims = [rank for rank in gap.missing if evidence.is_victim(rank)]
    waiting, call = sorted({*gap.calls, *victims}), gap.call
    if len(ended) < len(waiting) or (len(ended) == len(waiting) and left):
        return None
    what, few = f"the {name_call(call)} of group {gap.group}", list_ranks(ended)
    tied = len(ended) == len(waiting)
    if tied:
        summary = f"the ranks made different numbers of calls: {list_ranks(waiting)} called {what}"
        summary += f", and {few} had ended; the records do not show which number is right"
    else:
        summary = f"{list_ranks(waiting)} made one more call than the others: {what}; {few} made "
        summary += "the same number of calls and ended"
    return Finding(
        Kind.MISMATCH,
        () if tied else waiting,
        summary,
        _FOR_UNEVEN,
        _counts(evidence, gap),
        (call.place,),
        time=call.created,
    )


def _counts(evidence: Evidence, gap: Gap) -> list[str]:
    """Count each rank's calls of the line of a gap, which shows whether a rank took fewer steps."""
    counts: dict[int, list[int]] = {}
    for rank, dump in evidence.dumps.ranks.items():
        times = sum(c.place == gap.call.place for c in dump.calls.get(gap.group, ()))
        counts.setdefault(times, []).append(rank)
    if not gap.call.frame["filename"] or len(counts) < 2:
        return []
    each = [f"{list_ranks(ranks)} {times} times" for times, ranks in sorted(counts.items())]
    return [f"line {gap.call.frame['line']} called it on " + ", on ".join(each)]


def _missing(evidence: Evidence, gap: Gap, away: list[int]) -> Finding:
    call, first = gap.call, evidence.dumps.ranks[away[0]]
    ended = evidence.ended(away[0])
    interrupted = bool(first.events) and was_interrupted(first.events[-1])
    doing = _what_it_did(evidence, away[0])
    about = [evidence.last_call(rank, gap.group) for rank in away]
    failed = [rank for rank in away if evidence.dumps.ranks[rank].events]
    about += [f"rank {rank} got {evidence.last_error(rank)}" for rank in failed]
    handler = swallowing_handler(call.place) if ended else None
    if handler is not None:
        line = call.frame["line"]
        about.append(f"line {line} is in a `try` whose `except` in line {handler} continues")
    who = "it" if len(away) == 1 else f"rank {away[0]}"
    return Finding(
        Kind.ERROR if interrupted else Kind.FINISHED if ended else Kind.MISSING,
        away,
        f"{evidence.on_host(away)} {_did_not_call(gap)}; {who} {doing.words}",
        doing.remedies,
        (*doing.details, *about, *_counts(evidence, gap)),
        (*doing.places, call.place),
        call.parameters,
        call.created,
    )


def _did_not_call(gap: Gap) -> str:
    waiting = f"{list_ranks(list(gap.calls))} wait{'s' if len(gap.calls) == 1 else ''}"
    return f"did not call the {name_call(gap.call)} of group {gap.group}, in which {waiting}"


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
    dumps, call, rank = evidence.dumps, gap.call, ranks[0]
    state, stack, trace = evidence.states.get(rank), dumps.stacks.get(rank), evidence.trace(rank)
    known = stack is not None or evidence.stopped_beating(rank)
    if not stack:
        stack = trace.stack if known and trace is not None else []
    others = any(rank in of for name, of in dumps.groups.items() if name != gap.group)
    where = f"; it runs no Python code{at_line(stack)}: C code holds the GIL"
    remedies: tuple[str, ...] = _FOR_GIL
    if not known:
        where = ", and left no dump"
        remedies = (
            "see its log, and whether its process still runs: it may hang in C code",
            "check that its host can be reached",
        )
    return Finding(
        Kind.MISSING,
        () if others and not known else ranks,
        f"{list_ranks(ranks)} {_did_not_call(gap)}{where}",
        remedies,
        (*([f"its process is {state}"] if state else []), evidence.last_call(rank)),
        (*place_of(stack), call.place),
        call.parameters,
        call.created,
        confidence="" if known else UNCLEAR,
    )


# -- late ranks ----------------------------------------------------------------------------------


def find_late(evidence: Evidence) -> Finding | None:
    """Find ranks that made a call only after others had given up waiting in it."""
    dumps = evidence.dumps
    for group, ranks in dumps.groups.items():
        calls = dumps.calls(group)
        for number in sorted(calls, reverse=True)[:3]:
            of = calls[number]
            if len(of) == len(ranks) > 1 and dumps.same_clock(of):
                found = _late_in(evidence, of)
                if found is not None:
                    return found
    return _late_errors(evidence)


def _late_in(evidence: Evidence, calls: Mapping[int, Call]) -> Finding | None:
    """Return a finding if some ranks called a collective after all others had failed in it."""
    ordered = sorted(calls, key=lambda rank: calls[rank].created)
    for count in range(len(ordered) - 1, 0, -1):
        first, late = sorted(ordered[:count]), sorted(ordered[count:])
        came = min(calls[rank].created for rank in late)
        since = max(calls[rank].created for rank in first)
        gave_up = [evidence.fails_at(rank) for rank in first]
        if came - since > LONG_NS and max(gave_up) < came + LONG_NS // 10 and min(gave_up) > since:
            break
    else:
        return None
    call = calls[late[0]]
    words, ranks, doing = "", late, _Doing("", _FOR_LATE)
    # what they did when the others gave up, if that was recorded
    then, stack = evidence.dumps.first(late[0]), evidence.dumps.stacks.get(late[0], [])
    if at_line(stack):
        words = f"; when they gave up, it did not answer{at_line(stack)}: C code held the GIL, or "
        words += "it got no CPU"
        doing = _Doing("", _FOR_GIL, place_of(stack))
    elif then is not None and then.reason == "request":
        doing = _what_it_waited_for(then)
        words = f"; when they gave up, it {doing.words}"
        holder = _lock_holder(evidence, then)
        if holder is not None and holder not in late:
            words += f" (rank {holder})"
            ranks = sorted({*late, holder})
    return Finding(
        Kind.DEADLOCK if len(ranks) > len(late) else Kind.MISSING,
        ranks,
        f"{list_ranks(late)} came {(call.created - since) / 1e9:.1f} s after {list_ranks(first)} "
        f"to the {name_call(call)}, which had given up by then{words}",
        doing.remedies,
        (*doing.details, *_errors(evidence, first)),
        (*doing.places, call.place),
        call.parameters,
        since,
    )


def _late_errors(evidence: Evidence) -> Finding | None:
    """Find ranks whose error came long after all others had given up waiting and ended."""
    # They were not waiting when the others left, which would have ended their wait as well. This
    # also finds a missing rank if no rank lacks a collective, such as with messages.
    dumps = evidence.dumps.ranks
    failed_at = {rank: dump.events[-1].time if dump.events else 0 for rank, dump in dumps.items()}
    ranks = sorted(failed_at, key=failed_at.__getitem__)
    waited = all(dump.events and not evidence.primary[rank] for rank, dump in dumps.items())
    if not waited or len(ranks) < len(evidence.dumps.world) or not evidence.dumps.same_clock(ranks):
        return None
    for count in range(1, len(ranks)):
        ended = max(dumps[rank].taken_ns for rank in ranks[:count])
        if failed_at[ranks[count]] > ended + _STAYS_NS + LONG_NS:
            break
    else:
        return None
    first, late = sorted(ranks[:count]), sorted(ranks[count:])
    event = dumps[late[0]].events[-1]
    after = (event.time - max(failed_at[rank] for rank in first)) / 1e9
    call = f"called {event.call}" if event.call else "arrived"
    who = "it" if len(late) == 1 else f"rank {late[0]}"
    called = [evidence.last_call(rank) for rank in late[:2] if dumps[rank].calls]
    return Finding(
        Kind.MISSING,
        late,
        f"{list_ranks(late)} did not arrive while {list_ranks(first)} waited; {who} {call}"
        f"{at_line(event.lines)} {after:.1f} s after they had failed",
        _FOR_LATE,
        [*_errors(evidence, first), *called],
        place_of(event.lines),
    )


def _errors(evidence: Evidence, ranks: Sequence[int]) -> list[str]:
    return [f"rank {rank}: {evidence.last_error(rank)}" for rank in ranks[:6]]


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
    if evidence.ended(rank):
        call = dump.exit
        lines = call.lines if call is not None else []
        words = f"had called {call.how}{at_line(lines)}" if call is not None else "had ended"
        words += f", and ended with exit code {call.code}" if call is not None else ""
        remedies = (
            "find out why its loop ended before the others': a shorter dataset, an early `break`",
            "or use join() for uneven inputs",
        )
        return _Doing(words, remedies, place_of(lines))
    if dump.events and was_interrupted(dump.events[-1]):
        at = dump.events[-1].lines
        remedy = "find out what sent SIGINT: Ctrl-C in a terminal, a launcher, a debugger"
        return _Doing(f"was interrupted{at_line(at)}", (remedy,), place_of(at))
    return _what_it_waited_for(dump)


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
    elif call == "read" and kernel.get("descriptor") == 0:
        words += ", waiting for input from its terminal (standard input)"
        remedies = ("do not ask for input in a rank: pass it as an argument",)
    elif any(_LOADING in str(frame["filename"]) for frame in dump.stack):
        words += ", waiting for its data loader"
        look = "look at the dataset's __getitem__ and at the storage that it reads"
        remedies = (look, "pass a timeout to the DataLoader")
        for child in children:
            stacks = parse_stacks(str(child.get("stack", "")))
            frames = stacks[-1][1] if child.get("stack") and stacks else []
            if at_line(frames) and not _is_idle_worker(frames):
                words += f": worker process {child['pid']} is{at_line(frames)}"
                remedies = ("find out what that line of the dataset waits for", look)
                places = place_of(frames) + places
                break
    elif call == "wait" and children:
        blocked = [child for child in children if child.get("full pipe")]
        child = (blocked or children)[0]
        words += f", waiting for its child process {child['pid']}"
        details = [f"the child is: {child.get('command', '')}"]
        remedies = ("see what the child process does, and give the wait a timeout",)
        if blocked:
            words += ", which is blocked writing to a pipe that is full"
            remedies = ("read its output while it runs: use subprocess.run or communicate()",)
    return _Doing(words, remedies, places, details)


def _is_idle_worker(frames: Sequence[Frame]) -> bool:
    """Return True if a loader's worker waits for work, in PyTorch's own loop."""
    for frame in frames:
        if is_users(frame) or str(frame["name"]) == "_worker_loop":
            return not is_users(frame)
    return True
