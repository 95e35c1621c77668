"""Facts that rules build on: where each rank stands, who failed first, and what explains an error.

Nothing here decides on a cause. Findings and their words are here as well.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import groupby
from pathlib import Path

from gradwire._processes import ENDED
from gradwire.recorder.files import ErrorRecord
from gradwire.recorder.verdict.dumps import Call, Dumps, Frame, RankDump, Trace

LONG_NS = 1_000_000_000
"""Upper bound on noticing that a process has ended; a rank waited for longer was late before."""
NEVER = 1 << 63
CERTAIN, LIKELY, UNCLEAR = "certain", "likely", "unclear"
OF_WHOLE_GROUPS = {"barrier", "init_process_group", "monitored_barrier", "new_group"}
"""Calls that end once all ranks have made them, and that may be missing from the records."""
TOGETHER = {"all_gather", "all_gather_single", "all_reduce", "all_to_all", "barrier"}
"""Collectives that end on all ranks at about the same time, since no rank can finish early."""

_BEATS_NS = 700_000_000  # a living process has written a beat in this time, on a busy machine
_SECONDARY = {"CollectiveTimeoutError", "PeerFailedError", "PeerLostError", "BrokenGroupError"}
_SECONDARY |= {"DistBackendError", "DistNetworkError", "DistStoreError", "CheckedMismatchError"}
_SECONDARY |= {"KeyboardInterrupt", "MismatchError", "SIGTERMException"}
"""Errors caused by other ranks' failures, or of which the recorded calls show more."""
_TOLD = {"BrokenGroupError", "CheckedMismatchError", "MismatchError", "PeerFailedError"}
_TOLD |= {"PeerLostError"}
"""Errors among them that end a wait before its time is up."""
_OF_HANDLES = {"result", "synchronize", "value", "wait", "wait_all"}
"""Methods that end an earlier call, which may be a message."""
_MESSAGES = {"recv", "irecv", "send", "isend", "batch_isend_irecv"}
_MESSAGES |= {"recv_object_list", "send_object_list"}
_UNRECORDED = OF_WHOLE_GROUPS | _OF_HANDLES | _MESSAGES
"""Calls that wait, of which Gloo's record may have nothing."""
_STANDARD = ("/lib/python3", "/Lib/", "<frozen ")
_COMMUNICATION = ("/torch/distributed/", "/gradwire/", "gradwire_autoload.py")
_LIBRARIES = ("/site-packages/", "/torch/", "/gradwire/", "/bin/", *_STANDARD)
_MAX_BYTES = 1 << 22  # limit on source files to parse
_MOST_PARTS = 6
_SECONDS_FROM_NS = 100_000_000


# -- findings ------------------------------------------------------------------------------------


class Kind:
    """Kinds of findings."""

    CRASHED = "crashed"
    DEADLOCK = "deadlock"
    DIED = "died"
    ERROR = "error"
    FINISHED = "finished early"
    MISMATCH = "mismatch"
    MISSING = "missing"
    NOTHING = "nothing"
    NOT_FINITE = "not finite"
    SKIPPED = "skipped"
    SLOW_RANK = "slow rank"
    SLOW_TRANSFER = "slow transfer"
    START = "start-up"
    STOPPED = "stopped"
    UNCLEAR = "unclear"


@dataclass(frozen=True)
class Finding:
    """One problem.

    Attributes:
        kind: One of `Kind`.
        ranks: Ranks that caused it; empty if the dumps do not show them.
        summary: Description in one sentence.
        remedies: At most three things to do, in the imperative.
        details: Evidence and consequences, one per line.
        places: Lines of the user's code, as "file:line".
        parameters: Model parameters.
        time: Time when the ranks departed from what the others did, in ns; 0 if unknown.
        rule: Name of the rule that found it.
        confidence: One of `CERTAIN`, `LIKELY` and `UNCLEAR`.
    """

    kind: str
    ranks: Sequence[int]
    summary: str
    remedies: Sequence[str] = ()
    details: Sequence[str] = ()
    places: Sequence[str] = ()
    parameters: Sequence[str] = ()
    time: int = 0
    rule: str = ""
    confidence: str = ""


@dataclass(frozen=True)
class Verdict:
    """Verdict on a directory of dumps.

    Attributes:
        findings: Findings, the cause first.
        world_size: Number of ranks.
        dumps: Ranks whose dumps were read.
        notes: Limits of the verdict.
        processes: Process ID and host of each rank, in words.
    """

    findings: Sequence[Finding]
    world_size: int
    dumps: Sequence[int]
    notes: Sequence[str] = field(default=())
    processes: Mapping[int, str] = field(default_factory=dict)

    @property
    def healthy(self) -> bool:
        """True if nothing failed; a rank may still be slow."""
        calm = (Kind.NOTHING, Kind.SLOW_RANK, Kind.SLOW_TRANSFER)
        return all(finding.kind in calm for finding in self.findings)


# -- words ---------------------------------------------------------------------------------------


def list_ranks(ranks: Sequence[int]) -> str:
    """Describe ranks: "rank 1", "ranks 0 and 2", "ranks 0 to 6 and 8"."""
    parts: list[str] = []
    for _, numbered in groupby(enumerate(sorted(ranks)), lambda each: each[1] - each[0]):
        run = [rank for _, rank in numbered]
        parts += [f"{run[0]} to {run[-1]}"] if len(run) > 3 else map(str, run)
    parts = [*parts[:_MOST_PARTS], "others"] if len(parts) > _MOST_PARTS + 1 else parts
    shown = " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"


def were(ranks: Sequence[int]) -> str:
    """Describe ranks, with the verb: "rank 1 was"."""
    return f"{list_ranks(ranks)} {'was' if len(ranks) == 1 else 'were'}"


def by_ranks(texts: Mapping[int, str]) -> list[str]:
    """Describe what ranks did, those of equal texts together: "ranks 0 to 6: …"."""
    ranks: dict[str, list[int]] = {}
    for rank, text in sorted(texts.items()):
        ranks.setdefault(text, []).append(rank)
    return [f"{list_ranks(of)}: {text}" for text, of in ranks.items()]


def for_how_long(ns: float) -> str:
    """Describe a duration: "5.0 s", "40 ms"."""
    return f"{ns / 1e9:.1f} s" if ns >= _SECONDS_FROM_NS else f"{ns / 1e6:.0f} ms"


def name_line(frame: Frame) -> str:
    """Describe a line: "train.py:25 in step"."""
    return f"{Path(str(frame['filename'])).name}:{frame['line']} in {frame['name']}"


def name_call(call: Call, *, number: bool = True) -> str:
    """Describe a call: "all_reduce of [10] Float (number 5) at train.py:25 in step"."""
    text = call.op
    if call.sizes:
        sizes = ", ".join(str(list(size)) for size in call.sizes[:3])
        text += f" of {sizes}{', …' if call.sizes[3:] else ''} {' '.join(call.dtypes)}"
    if number:
        text += f" (number {call.number})"
    if call.parameters:
        text += f" for {list_names(call.parameters)}"
    return f"{text} at {name_line(call.frame)}" if call.frame["filename"] else text


def list_names(names: Sequence[str]) -> str:
    """Describe parameters: "a.weight, a.bias, b.weight, … (6)"."""
    return ", ".join(names[:3]) + (f", … ({len(names)})" if names[3:] else "")


def at_line(frames: Sequence[Frame]) -> str:
    """Describe the innermost line of the user: " at train.py:25 in step"; "" if there is none."""
    return next((f" at {name_line(frame)}" for frame in frames if is_users(frame)), "")


def place_of(frames: Sequence[Frame]) -> list[str]:
    """Return the innermost line of the user's own code; empty if there is none."""
    return [f"{f['filename']}:{f['line']}" for f in frames if is_users(f)][:1]


def unique(places: Sequence[str]) -> list[str]:
    """Return lines in order, each once."""
    return list(dict.fromkeys(places))


def is_users(frame: Frame) -> bool:
    """Return True if a frame is in the user's own code, as recorded or else by its file name."""
    if "user" in frame:
        return bool(frame["user"])
    return not any(part in str(frame["filename"]) for part in _LIBRARIES)


# -- the user's source ---------------------------------------------------------------------------


def swallowing_handler(place: str) -> int | None:
    """Return the line of an `except` without `raise` that would skip a line after an error."""
    found = None
    for node, line in _nodes(place):  # breadth-first: the innermost comes last
        tries = [node] if isinstance(node, ast.Try) and _contains(node.body, line) else []
        if isinstance(node, ast.For | ast.While) and _contains(node.body, line):
            tries = [each for each in node.body if isinstance(each, ast.Try) and each.lineno < line]
        for each in tries:
            for handler in each.handlers:
                inner = {type(statement) for statement in ast.walk(handler)}
                leaves = each is node or not inner.isdisjoint((ast.Continue, ast.Break, ast.Return))
                if ast.Raise not in inner and leaves:
                    found = handler.lineno
    return found


def iterates_over_set(place: str) -> bool:
    """Return True if a line is in a loop over a set."""
    loops, sets = list[ast.expr](), set[str]()
    for node, line in _nodes(place):
        if isinstance(node, ast.Assign) and _is_set(node.value):
            sets |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        if isinstance(node, ast.For) and _contains(node.body, line):
            loops.append(node.iter)
    return any(_is_set(it) or (isinstance(it, ast.Name) and it.id in sets) for it in loops)


def _is_set(node: ast.expr) -> bool:
    called = node.func if isinstance(node, ast.Call) else None
    made = isinstance(called, ast.Name) and called.id in ("set", "frozenset")
    return made or isinstance(node, ast.Set | ast.SetComp)


def _nodes(place: str) -> Iterator[tuple[ast.AST, int]]:
    """Yield the nodes of a line's file, each with the line's number."""
    filename, _, line = place.rpartition(":")
    tree = _parse(filename)
    for node in ast.walk(tree) if tree is not None else ():
        yield node, int(line)


def _contains(body: Sequence[ast.stmt], line: int) -> bool:
    return bool(body) and body[0].lineno <= line <= (body[-1].end_lineno or 0)


@lru_cache(maxsize=64)
def _parse(filename: str) -> ast.AST | None:
    path = Path(filename)
    try:
        if not path.is_file() or path.stat().st_size > _MAX_BYTES:
            return None
        return ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None


# -- facts ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gap:
    """Collective in which some ranks wait and that other ranks have not called."""

    group: str
    number: int
    # by rank
    calls: Mapping[int, Call]
    # ranks that had not called it when they wrote their dumps
    missing: list[int]
    # ranks without a dump, or with an earlier one
    silent: list[int]

    @property
    def call(self) -> Call:
        """Call of one of the ranks that wait."""
        return next(iter(self.calls.values()))


@dataclass(frozen=True)
class Standing:
    """Call in which a rank waits, or waited until it failed."""

    # "" if unknown, such as for the wait of a handle
    op: str
    # line of the call, as "file:line"
    place: str
    # description of the call
    words: str
    # rank whose message it waits for; None for a call of a whole group
    peer: int | None = None

    @classmethod
    def at(cls, op: str, frame: Frame) -> Standing:
        """Stand in a call that a line makes."""
        words = f"in {op or 'a call'} at {name_line(frame)}"
        return cls(op, f"{frame['filename']}:{frame['line']}", words)

    @property
    def site(self) -> tuple[str, str]:
        """Operation and line."""
        return self.op, self.place


class Evidence:
    """Facts of dumps, as they were when the first rank gave up waiting, if one has.

    What ranks did after that is a consequence: a lock that the rank held is released, a rank that
    was late arrives in a call that the others have left. The last call of a rank that failed in it
    counts as running.
    """

    def __init__(self, dumps: Dumps, *, live: bool = False) -> None:
        self.dumps, self.live = dumps, live
        self.gave_up = NEVER
        # time when a rank's wait for the others was over, if that was the first failure
        self.gave_up = self._first_timeout()
        # times of calls that ranks made only then, by rank, group and number
        self.arrivals = {
            (rank, group, call.number): call.created
            for rank, dump in dumps.ranks.items()
            for group, calls in dump.calls.items()
            for call in calls
            if call.created > self.gave_up
        }
        self._came_after: dict[str, int] = {}
        for _, group, number in self.arrivals:
            self._came_after[group] = min(number, self._came_after.get(group, NEVER))
        for rank, dump in dumps.ranks.items():
            self._return_to_that_time(rank, dump)
        for rank, dump in dumps.ranks.items():
            self._reopen_last(rank, dump)
        dumps.numbered.clear()

    def _first_timeout(self) -> int:
        dumps, together = self.dumps, [0, 0]
        for group, ranks in dumps.groups.items():
            common = (
                of.values() for of in dumps.calls(group).values() if len(of) == len(ranks) > 1
            )
            together += [min(map(_created, calls)) for calls in common]
        # an error after which all ranks made two more calls together was handled
        handled = sorted(together)[-2]
        events = [
            (e.time, r, e)
            for r, dump in dumps.ranks.items()
            for e in dump.events
            if e.time > handled or e.kind == "thread"
        ]
        if len(self.interrupted) > 1:  # by Ctrl-C, which ends waits and everything else at once
            events = [each for each in events if not was_interrupted(each[2])]
        if not events or not dumps.same_clock(dumps.ranks):
            return NEVER
        when, rank, event = min(events, key=lambda each: each[0])
        over = min(map(self.ends_at, dumps.world)) < when  # its end has ended the wait
        return when if not over and self._waited_long(rank, event) else NEVER

    def _waited_long(self, rank: int, event: ErrorRecord) -> bool:
        """Return True if a call that waits for others had lasted for long when it failed."""
        types = {event.type, *event.chain}
        if types & _TOLD or (event.raised and not types & _SECONDARY) or was_interrupted(event):
            return False
        if "CollectiveTimeoutError" in types:
            return True
        lines = {f"{line['filename']}:{line['line']}" for line in event.lines}
        calls = [c for of in self.dumps.ranks[rank].calls.values() for c in of]
        before = [c for c in calls if c.created < event.time and c.place in lines]
        last = max(before, key=_created, default=None)
        if not event.waited and not types & _SECONDARY:  # from backward, of an operator or Gloo
            if last is None:
                return False
            of = self.dumps.calls(last.group)[last.number].values()
            made = [call for call in of if call.op == last.op and call.created < event.time]
            if len(made) == len(self.dumps.groups[last.group]):
                return False
        began = last.created if last is not None else event.since
        return bool(began) and event.time - began > LONG_NS

    def _return_to_that_time(self, rank: int, dump: RankDump) -> None:
        """Undo what a rank did after `gave_up`."""
        asked = dump.reason == "request"
        moments = [m for m in dump.moments if self.gave_up <= m.time < NEVER]
        moment = moments[0] if moments else dump.moments[-1] if dump.moments and asked else None
        if moment is not None:
            dump.stack, dump.kernel = moment.stack, moment.kernel
        elif self.gave_up < NEVER and dump.events and was_interrupted(dump.events[-1]):
            dump.stack = list[Frame](dump.events[-1].lines)
        elif self.gave_up < self.fails_at(rank):
            dump.stack = self.dumps.stacks.get(rank, [])  # it may have gone on since
        for group, calls in dump.calls.items():
            dump.calls[group] = [
                replace(call, done=False)
                if call.ended > self.gave_up or call.number >= self._came_after.get(group, NEVER)
                else call
                for call in calls
                if call.created <= self.gave_up
            ]

    # -- errors --------------------------------------------------------------------------------

    def _reopen_last(self, rank: int, dump: RankDump) -> None:
        """Mark the call in which a rank failed as running."""
        # Gloo's recorder does not distinguish failed calls from successful ones. A collective that
        # a rank has left for a later one was complete, and an error of Python code is no failed
        # call. Several async calls may be made in one line.
        last = max((of[-1] for of in dump.calls.values() if of), key=_created, default=None)
        if last is None or last.ended:
            return
        for event in dump.events:
            types = {event.type, *event.chain}
            lines = [f"{line['filename']}:{line['line']}" for line in event.lines]
            wait = event.waited or "RuntimeError" in types or not _SECONDARY.isdisjoint(types)
            if wait and (not lines or event.call in _OF_HANDLES or last.place in lines):
                break
        else:
            return
        for other, theirs in self.dumps.ranks.items() if last.op in TOGETHER else ():
            of = theirs.calls.get(last.group, [])
            if other != rank and of and of[-1].number > last.number:
                same = [each for each in of if each.number == last.number]
                since = of[-1].created - (same[0].created if same else 0)
                if of[-1].place != last.place or since > LONG_NS // 2:
                    return
        dump.calls[last.group][-1] = replace(last, done=False)

    @cached_property
    def primary(self) -> dict[int, list[ErrorRecord]]:
        """Errors of each rank that no other rank's failure explains."""
        return {
            rank: [event for event in dump.events if self._is_primary(rank, event)]
            for rank, dump in self.dumps.ranks.items()
        }

    def _is_primary(self, rank: int, event: ErrorRecord) -> bool:
        types = {event.type, *event.chain}
        if event.time > self.gave_up:
            return False
        if event.type == "KeyboardInterrupt":
            return self.interrupted == [rank] and not self._waited_long(rank, event)
        if types & _SECONDARY or event.kind == "thread":
            return False
        if self._follows_a_wait(rank, event):
            return False
        if event.own or event.raised or "RuntimeError" not in types:
            return not event.waited
        # Gloo raises plain RuntimeErrors in C++, as operators, argument checks, and the comparison
        # of models do: it is none of Gloo's if nothing had happened that Gloo would report
        if event.waited and (self.dumps.ranks[rank].pending or event.call in _UNRECORDED):
            forms = event.call in ("init_process_group", "new_group") and event.since
            if not forms or event.time - event.since > LONG_NS:  # else, its time was not up
                return False
        return not self._is_explained(rank, event)

    def _is_explained(self, rank: int, event: ErrorRecord) -> bool:
        """Return True if another rank failed or ended before, or if this one waited for long."""
        if self._waited_long(rank, event):
            return True
        for other in self.dumps.world:
            if other == rank:
                continue
            has_dump = other in self.dumps.ranks
            known = self.dumps.same_clock([rank, other]) if has_dump else other in self.dumps.traces
            if not known or min(self.fails_at(other), self.ends_at(other)) <= event.time:
                return True
        return False

    def _follows_a_wait(self, rank: int, event: ErrorRecord) -> bool:
        """Return True if a rank raised an error after waiting in vain for missing ranks."""
        for gap in self.gaps:
            call = gap.calls.get(rank)
            if call is None or call.done or call.created > event.time:
                continue
            dead = {r for r, state in self.states.items() if state in ENDED}
            dead |= {r for r, exit_ in self.dumps.exits.items() if exit_.code}
            if not event.raised:  # connections are closed before an end is noted
                dead |= {r for r, d in self.dumps.ranks.items() if self.ended(r) and not d.events}
            late = event.time - call.created > LONG_NS
            if late or not dead.isdisjoint([*gap.missing, *gap.silent]):
                return True
        return False

    @cached_property
    def interrupted(self) -> list[int]:
        """Ranks that KeyboardInterrupt ended; Ctrl-C reaches all ranks."""
        ranks = self.dumps.ranks.items()
        found = [r for r, d in ranks if any(e.type == "KeyboardInterrupt" for e in d.events)]
        return found if len(self.dumps.world) > 1 else []

    def fails_at(self, rank: int) -> int:
        """Return the time of a rank's first error; the end of time if it had none."""
        dump = self.dumps.ranks.get(rank)
        return min((event.time for event in dump.events), default=NEVER) if dump else NEVER

    def last_error(self, rank: int) -> str:
        """Describe a rank's last error."""
        event = self.dumps.ranks[rank].events[-1]
        text = f": {event.text(300)}" if event.message else ""
        return f"{event.type}{at_line(event.lines)}{text}"

    def consequences(self, culprits: Sequence[int]) -> list[str]:
        """Describe the consequences on other ranks."""
        texts = {}
        for rank, dump in self.dumps.ranks.items():
            pending = dump.pending
            if rank not in culprits and pending:
                texts[rank] = f"waited in the {name_call(pending[0])}"
            elif rank not in culprits and dump.events:
                texts[rank] = f"got {self.last_error(rank)}"
        return by_ranks(texts)

    def first_other_line(self, ranks: Sequence[int]) -> tuple[Call, Call] | None:
        """Return the first collective that ranks called in another line, and the others' call."""
        # Lines that occurred together before are no evidence, such as those of a root and of the
        # other ranks.
        for group in self.dumps.groups:
            common, mixed = set[str](), set[str]()
            for calls in self.dumps.calls(group).values():
                mine = [calls[rank] for rank in ranks if rank in calls]
                theirs = [call for rank, call in calls.items() if rank not in ranks]
                places = {call.place for call in theirs}
                if len(calls) == len(self.dumps.groups[group]) and mine and theirs:
                    if mine[0].place in places:
                        common |= places
                    elif len(places) == 1 and places <= common and mine[0].place not in mixed:
                        return mine[0], theirs[0]
                    mixed |= places | {mine[0].place} if mine[0].place not in places else set()
        return None

    # -- processes -------------------------------------------------------------------------------

    @cached_property
    def states(self) -> dict[int, str]:
        """Newest state of each process, as others have recorded it."""
        seen: dict[int, tuple[int, str]] = {}
        for dump in sorted(self.dumps.ranks.values(), key=lambda dump: dump.taken_ns):
            seen |= {rank: (dump.taken_ns, state) for rank, state in dump.peers.items()}
        for rank, found in self.dumps.kernel.items():
            if str(found.get("state", "")).startswith("stopped"):
                seen[rank] = int(found["time"]), str(found["state"])
        # a process that has written something since was continued
        return {
            rank: state
            for rank, (when, state) in seen.items()
            if not (state.startswith("stopped") and self._last_written(rank) > when)
        }

    def ended(self, rank: int) -> bool:
        """Return True if a rank's process wrote its dump at its end."""
        dump = self.dumps.ranks.get(rank)
        return dump is not None and dump.reason == "exit"

    def had_ended(self, rank: int) -> bool:
        """Return True if it had ended when another rank gave up waiting; nobody had, by itself."""
        return self.ended(rank) and self.gave_up == NEVER

    def is_over(self, rank: int) -> bool:
        """Return True if a rank's process is known to have ended."""
        noted = rank in self.dumps.exits or rank in self.dumps.crashes
        return noted or self.states.get(rank) in ENDED or self.ended(rank)

    def ends_at(self, rank: int) -> int:
        """Return the earliest time when a process may have ended; the end of time if it runs."""
        if self.ended(rank):
            dump = self.dumps.ranks[rank]
            return dump.ended_ns or dump.taken_ns
        if rank in self.dumps.crashes:
            return self.dumps.crashes[rank].time
        return self.last_seen(rank) if self.is_over(rank) else NEVER

    def last_seen(self, rank: int) -> int:
        """Return the last time when a process was seen alive: a killed one has ended after it."""
        seen = [other.peers_alive_ns.get(rank, 0) for other in self.dumps.ranks.values()]
        return max([self._last_written(rank), *seen])

    def _last_written(self, rank: int) -> int:
        trace, dump = self.trace(rank), self.dumps.ranks.get(rank)
        return max(trace.beat if trace else 0, dump.taken_ns if dump else 0)

    def trace(self, rank: int) -> Trace | None:
        """Return a rank's ring file, if it is of the process that wrote the dump."""
        trace, dump = self.dumps.traces.get(rank), self.dumps.ranks.get(rank)
        if trace is not None and dump is not None and dump.pid not in (0, trace.pid):
            return None
        return trace

    def last_stack(self, rank: int) -> list[Frame]:
        """Return the main thread's frames at the last beat, unless the rank went on after it."""
        trace = self.dumps.traces.get(rank)
        if trace is None or not trace.beat:
            return []
        went_on = trace.calls[-1]["begin"] > trace.beat if trace.calls else not trace.counts
        return [] if went_on else trace.stack

    def stopped_beating(self, rank: int) -> bool:
        """Return True if a process stopped running Python though it has not ended."""
        trace = self.trace(rank)
        if trace is None or not trace.beat or self.is_over(rank) or rank not in self.dumps.kernel:
            return False
        # compared with the beats of others on this clock: the longest-living of them
        others = [self.trace(other) for other in self.dumps.world if other != rank]
        beats = [other.beat for other in others if other is not None]
        newest = max([*beats, *(dump.taken_ns for dump in self.dumps.ranks.values())])
        return newest - trace.beat > _BEATS_NS

    # -- calls -----------------------------------------------------------------------------------

    @cached_property
    def gaps(self) -> list[Gap]:
        """First collective of each group that not all ranks have called, oldest first."""
        gaps = []
        for group, ranks in self.dumps.groups.items():
            last = {
                rank: dump.calls[group][-1].number if dump.calls.get(group) else 0
                for rank, dump in self.dumps.ranks.items()
                if rank in ranks
            }
            for number, calls in self.dumps.calls(group).items():
                absent = [r for r in ranks if r not in calls and last.get(r, 0) < number]
                if absent and any(not call.done for call in calls.values()):
                    silent = [r for r in absent if not self._was_written_since(r, calls)]
                    missing = [r for r in absent if r not in silent]
                    gaps.append(Gap(group, number, calls, missing, silent))
                    break
        return sorted(gaps, key=lambda gap: min(map(_created, gap.calls.values())))

    def _was_written_since(self, rank: int, calls: Mapping[int, Call]) -> bool:
        """Return True if a rank wrote its dump after others' calls, or at its end."""
        dump = self.dumps.ranks.get(rank)
        if dump is None or dump.reason == "exit":
            return dump is not None
        known = dump.taken_ns and self.dumps.same_clock([rank, *calls])
        return not known or dump.taken_ns > min(map(_created, calls.values()))

    @cached_property
    def began(self) -> bool:
        """True if a rank has made a collective, so that all ranks were there."""
        traces = self.dumps.traces.values()
        calls = any(of for dump in self.dumps.ranks.values() for of in dump.calls.values())
        return calls or any(trace.calls or any(trace.counts.values()) for trace in traces)

    def last_call(self, rank: int, group: str | None = None) -> str:
        """Describe a rank's last collective, in one group or in any."""
        dump, trace = self.dumps.ranks.get(rank), self.dumps.traces.get(rank)
        if dump is None and trace is not None and trace.calls:
            last = trace.calls[-1]
            at = f" at {name_line(last['line'])}" if last["line"] else ""
            open_ = "" if last["end"] else ", which had not ended"
            what = f"{last['op']} (number {last['number']})"
            return f"its last call was {what}{at}{open_}"
        if dump is None and trace is not None and trace.counts:
            counts = ", ".join(f"{n} in group {name}" for name, n in sorted(trace.counts.items()))
            return f"it had made at least so many calls: {counts}"
        if dump is None:
            return "it left no dump"
        calls = [c for g, of in dump.calls.items() if group in (None, g) for c in of]
        if not calls:
            return "it had made no call" + (f" in group {group}" if group else "")
        return f"its last call was the {name_call(max(calls, key=_created))}"

    def standing(self, rank: int) -> Standing | None:
        """Return the call in which a rank waits for others; None if none, or if it is unknown."""
        dump = self.dumps.ranks.get(rank)
        if dump is None:
            return _stands_in(self.dumps.stacks.get(rank, ()))
        if dump.pending:
            call = dump.pending[0]
            return Standing(call.op, call.place, f"in the {name_call(call)}")
        for message in dump.messages:
            op, peer, at = message["op"], message["peer"], name_line(message["frame"])
            if message["state"] != "completed":
                words = f"for a message from rank {peer} at {at}" if op == "recv" else ""
                words = words or f"for rank {peer} to receive a message at {at}"
                return replace(Standing.at(op, message["frame"]), words=words, peer=peer)
        # it waited in this call when its last error was raised
        for event in dump.events[-1:]:
            came = [at for (of, *_), at in self.arrivals.items() if of == rank and at < event.time]
            then = max(came, default=event.since or event.time - LONG_NS) <= self.gave_up
            wait = not event.raised or not _SECONDARY.isdisjoint((event.type, *event.chain))
            if then and wait and event not in self.primary[rank] and event.lines:
                if was_interrupted(event) or event.kind == "thread":
                    break
                return Standing.at("" if event.call in _OF_HANDLES else event.call, event.lines[0])
        return None if self.had_ended(rank) else _stands_in(dump.stack)

    @cached_property
    def standings(self) -> dict[int, Standing | None]:
        """Call in which each rank with a dump waits."""
        return {rank: self.standing(rank) for rank in self.dumps.ranks}

    def is_victim(self, rank: int) -> bool:
        """Return True if another rank's failure explains all errors of a rank."""
        late = self.fails_at(rank) > self.gave_up
        late |= self.gave_up < NEVER and rank in self.interrupted
        failed = any(event.kind != "thread" for event in self.dumps.ranks[rank].events)
        return failed and not self.primary[rank] and not late

    def makes_progress(self) -> bool:
        """Return True if no rank has failed or ended, or has waited for more than a second."""
        dumps = self.dumps
        if dumps.exits or dumps.kernel or dumps.crashes or any(map(self.is_over, dumps.world)):
            return False
        if any(dump.events for dump in dumps.ranks.values()):
            return False
        waits = [d.taken_ns - call.created for d in dumps.ranks.values() for call in d.pending]
        waits += [d.taken_ns - d.since_ns for d in dumps.ranks.values() if _stands_in(d.stack)]
        return bool(dumps.ranks) and max(waits, default=0) < LONG_NS


def waits_for_others(stack: Sequence[Frame]) -> bool:
    """Return True if the innermost code of a stack communicates."""
    for frame in stack:
        filename = str(frame["filename"])
        if is_users(frame) or frame["name"] == "<module>":  # an import
            return False
        if "/site-packages/" in filename or not any(part in filename for part in _STANDARD):
            return any(part in filename for part in _COMMUNICATION)
    return False


def was_interrupted(event: ErrorRecord) -> bool:
    """Return True if a rank was interrupted in its own code, not in a wait for others."""
    return event.type == "KeyboardInterrupt" and not event.call and not event.waited


def _stands_in(stack: Sequence[Frame]) -> Standing | None:
    called = ""
    for frame in stack if waits_for_others(stack) else ():
        if is_users(frame):
            return Standing.at(called, frame)
        if any(part in str(frame["filename"]) for part in _COMMUNICATION):
            called = str(frame["name"]) if frame["name"] != "wrapper" else called
    return None


def _created(call: Call) -> int:
    return call.created
