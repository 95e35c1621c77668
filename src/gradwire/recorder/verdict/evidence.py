"""Findings and verdicts, and descriptions of ranks, lines and calls."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from gradwire._processes import ENDED
from gradwire.recorder.verdict.dumps import Call, Dumps, Event, RankDump, Trace


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
        details: Evidence and consequences, one per line.
        remedies: At most three things to do, in the imperative.
        op, group, number: Collective in which it appeared.
        places: Lines of the user's code, as "file:line".
        parameters: Model parameters.
        time: Time when the ranks departed from what the others did, in ns; 0 if unknown.
        rule: Name of the rule that found it.
        confidence: One of `CERTAIN`, `LIKELY` and `UNCLEAR`.
    """

    kind: str
    ranks: tuple[int, ...]
    summary: str
    details: tuple[str, ...] = ()
    remedies: tuple[str, ...] = ()
    op: str = ""
    group: str = ""
    number: int = 0
    places: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()
    time: int = 0
    rule: str = ""
    confidence: str = ""

    @property
    def remedy(self) -> str:
        """All remedies, as one text."""
        return "; ".join(self.remedies)


CERTAIN, LIKELY, UNCLEAR = "certain", "likely", "unclear"


@dataclass(frozen=True)
class Verdict:
    """Verdict on a directory of dumps.

    Attributes:
        findings: Findings, the cause first.
        world_size: Number of ranks.
        dumps: Ranks whose dumps were read.
        notes: Limits of the verdict.
    """

    findings: Sequence[Finding]
    world_size: int
    dumps: Sequence[int]
    notes: Sequence[str] = field(default=())

    @property
    def healthy(self) -> bool:
        """True if nothing failed; a rank may still be slow."""
        calm = (Kind.NOTHING, Kind.SLOW_RANK, Kind.SLOW_TRANSFER)
        return all(finding.kind in calm for finding in self.findings)

    def as_dict(self) -> dict[str, Any]:
        """Return a dict that JSON can represent."""
        return {
            "findings": [asdict(f) | {"remedy": f.remedy} for f in self.findings],
            "world_size": self.world_size,
            "dumps": list(self.dumps),
            "notes": list(self.notes),
        }


def list_ranks(ranks: Sequence[int]) -> str:
    """Describe ranks: "rank 1", "ranks 0 and 2", "ranks 0 to 6"."""
    ordered = sorted(ranks)
    if len(ordered) == 1:
        return f"rank {ordered[0]}"
    if len(ordered) > 3 and ordered == list(range(ordered[0], ordered[-1] + 1)):
        return f"ranks {ordered[0]} to {ordered[-1]}"
    return f"ranks {', '.join(map(str, ordered[:-1]))} and {ordered[-1]}"


def place_of(call: Call) -> str:
    """Describe the line of a call: "train.py:25 in step"; "" if unknown."""
    if not call.filename:
        return ""
    return f"{Path(call.filename).name}:{call.line} in {call.function}"


def name_place(frame: Mapping[str, Any]) -> str:
    """Describe a line: "at train.py:25 in step"."""
    return f"at {Path(str(frame['filename'])).name}:{frame['line']} in {frame['name']}"


def name_call(call: Call, *, number: bool = True) -> str:
    """Describe a call: "all_reduce of [10] Float (number 5) at train.py:25 in step"."""
    text = call.op
    if call.sizes:
        sizes = ", ".join(str(list(size)) for size in call.sizes[:3])
        text += f" of {sizes}{', …' if call.sizes[3:] else ''} {' '.join(call.dtypes)}"
    if number:
        text += f" (number {call.number})"
    if call.parameters:
        more = f", … ({len(call.parameters)})" if call.parameters[3:] else ""
        text += f" for {', '.join(call.parameters[:3])}{more}"
    return f"{text} at {place_of(call)}" if call.filename else text


def last_call(dumps: Dumps, rank: int, group: str | None) -> str:
    """Describe a rank's last collective, in one group or in any."""
    dump, trace = dumps.ranks.get(rank), dumps.traces.get(rank)
    if dump is None and trace is not None and (trace.calls or any(trace.counts.values())):
        if trace.calls:
            last = trace.calls[-1]
            open_ = "" if last["end"] else ", which had not ended"
            at = name_place(last["line"]) if last["line"] else ""
            return f"its last call was {last['op']} (number {last['number']}) {at}{open_}"
        counts = ", ".join(f"{n} on group {name}" for name, n in sorted(trace.counts.items()))
        return f"it had made at least {counts} calls"
    if dump is None:
        return "no dump"
    calls = [c for g, of in dump.calls.items() if group in (None, g) for c in of]
    if not calls:
        return "it called nothing" + (f" on group {group}" if group else "")
    return f"its last call was the {name_call(max(calls, key=lambda call: call.created))}"


def consequences(dumps: Dumps, culprits: Sequence[int]) -> list[str]:
    """Describe the consequences on other ranks."""
    lines = []
    for rank, dump in sorted(dumps.ranks.items()):
        pending = dump.pending
        if rank not in culprits and pending:
            lines.append(f"rank {rank} waited in the {name_call(pending[0])}")
        elif rank not in culprits and dump.events:
            event = dump.events[0]
            lines.append(f"rank {rank} got {event.type}: {shortened(event.message, 120)}")
    return lines[:6] + ([f"… and {len(lines) - 6} more ranks"] if lines[6:] else [])


def on_host(dumps: Dumps, ranks: Sequence[int]) -> str:
    """Describe the host of ranks, if the dumps are of several hosts: " on node-2"."""
    hosts = {dump.host for dump in dumps.ranks.values() if dump.host}
    own = {dumps.ranks[rank].host for rank in ranks if rank in dumps.ranks}
    return f" on {', '.join(sorted(own))}" if len(hosts) > 1 and own else ""


def at_line(lines: Sequence[Mapping[str, Any]]) -> str:
    """Describe the innermost line: " at train.py:25 in step"; "" if there is none."""
    now = innermost(lines)
    return f" at {now.removeprefix('at ')}" if now else ""


def innermost(frames: Sequence[Mapping[str, Any]]) -> str:
    """Describe the innermost line of the user's own code."""
    for frame in frames:
        if is_users(frame):
            return name_place(frame)
    return ""


def places_of(frames: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the lines of the user's own code, innermost first."""
    return [f"{f['filename']}:{f['line']}" for f in frames if is_users(f)]


def is_users(frame: Mapping[str, Any]) -> bool:
    """Return True if a frame is in the user's own code, as recorded or else by its file name."""
    if "user" in frame:
        return bool(frame["user"])
    parts = ("/site-packages/", "/torch/", "/gradwire/", "/lib/python3", "<frozen", "/bin/")
    return not any(part in str(frame["filename"]) for part in parts)


def last_of(dump: RankDump) -> str:
    """Describe a rank's last error."""
    event = dump.events[-1]
    return f"{event.type}{at_line(event.lines)}: {shortened(' '.join(event.message.split()), 300)}"


def shortened(text: str, length: int) -> str:
    """Shorten a text in its middle, since messages begin with what and end with why."""
    if len(text) <= length:
        return text
    return f"{text[: length * 2 // 3]} … {text[-length // 3 :]}"


_MAX_BYTES = 1 << 22  # limit on source files to parse


def swallowing_handler(filename: str, line: int) -> int | None:
    """Return the line of an `except` without `raise` that would catch an error in a line."""
    tree = _parse(filename)
    if tree is None:
        return None
    found = None
    for node in ast.walk(tree):  # breadth-first: the innermost comes last
        if not isinstance(node, ast.Try) or not node.body:
            continue
        end = node.body[-1].end_lineno or 0
        if node.body[0].lineno <= line <= end:
            for handler in node.handlers:
                if not any(isinstance(inner, ast.Raise) for inner in ast.walk(handler)):
                    found = handler.lineno
    return found


def is_conditional(filename: str, line: int) -> bool:
    """Return True if a line is in a loop, or under a condition in a function."""
    tree = _parse(filename)
    if tree is None:
        return False
    loops = ast.For | ast.While | ast.AsyncFor
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if not isinstance(body, list) or not body:
            continue
        inside = body[0].lineno <= line <= (body[-1].end_lineno or 0)
        if inside and isinstance(node, loops):
            return True
        if inside and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            branches = (each for each in ast.walk(node) if isinstance(each, ast.If))
            if any(each.lineno <= line <= (each.end_lineno or 0) for each in branches):
                return True
    return False


@lru_cache(maxsize=64)
def _parse(filename: str) -> ast.AST | None:
    path = Path(filename)
    try:
        if not path.is_file() or path.stat().st_size > _MAX_BYTES:
            return None
        return ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None


LONG_NS = 1_000_000_000
"""Upper bound on noticing that a process has ended; a rank waited for longer was late before."""
_BEATS_NS = 700_000_000  # a living process has written a beat in this time, on a busy machine
_SECONDARY = {  # errors caused by other ranks' failures
    "BrokenGroupError",
    "CheckedMismatchError",
    "CollectiveTimeoutError",
    "DistBackendError",
    "DistNetworkError",
    "DistStoreError",
    "KeyboardInterrupt",
    "MismatchError",  # the recorded calls show more
    "PeerFailedError",
    "PeerLostError",
    "SIGTERMException",
}
OF_WHOLE_GROUPS = {"barrier", "init_process_group", "monitored_barrier", "new_group"}
"""Calls that end once all ranks have made them, and that may be missing from the records."""
_OF_HANDLES = {"result", "synchronize", "value", "wait", "wait_all"}
"""Methods that end an earlier call, which may be a message."""
_UNRECORDED = {
    *OF_WHOLE_GROUPS,
    *_OF_HANDLES,
    *("recv", "irecv", "send", "isend", "batch_isend_irecv"),
    *("recv_object_list", "send_object_list"),
}
"""Calls that wait, of which Gloo's record may have nothing."""
_STANDARD = ("/lib/python3", "<frozen ")
_COMMUNICATION = ("/torch/distributed/", "/gradwire/", "gradwire_autoload.py")


@dataclass(frozen=True)
class Gap:
    """Collective in which some ranks wait and that other ranks have not called.

    Attributes:
        group, number: Group and number of the collective.
        calls: Calls, by rank.
        missing: Ranks that had not called it when they wrote their dumps.
        silent: Ranks without a dump, or with an earlier one.
    """

    group: str
    number: int
    calls: Mapping[int, Call]
    missing: tuple[int, ...]
    silent: tuple[int, ...] = ()


@dataclass(frozen=True)
class Standing:
    """Call in which a rank waits, or waited until it failed.

    Attributes:
        op: Name of the operation; "" if unknown, such as for the wait of a handle.
        filename, line: Line of the call.
        words: Description of the call.
        peer: Rank whose message it waits for; None for a call of a whole group.
    """

    op: str
    filename: str
    line: int
    words: str
    peer: int | None = None


class Evidence:
    """Facts of a directory of dumps.

    Args:
        dumps: Dumps; the last call of a rank that failed in it is marked as running.
    """

    def __init__(self, dumps: Dumps) -> None:
        self.dumps = dumps
        for rank, dump in dumps.ranks.items():
            self._reopen_last(rank, dump)

    # -- errors --------------------------------------------------------------------------------

    def _reopen_last(self, rank: int, dump: RankDump) -> None:
        """Mark the call in which a rank failed as running.

        Gloo's recorder does not distinguish failed calls from successful ones. A collective that a
        rank has left for a later one was complete, and an error of Python code is no failed call.
        """
        last = max((of[-1] for of in dump.calls.values() if of), key=_created, default=None)
        if last is None or last.ended:
            return
        if not any(_may_be_of_a_wait(event) and _is_at(event, last) for event in dump.events):
            return
        for other in self.dumps.ranks:
            if other != rank and self._has_left(other, last):
                return
        dump.calls[last.group][-1] = replace(last, done=False)

    def _has_left(self, rank: int, call: Call) -> bool:
        """Return True if a rank went on after a collective, which a later one may not show alone.

        Several async calls may be made in one line.
        """
        of = self.dumps.ranks[rank].calls.get(call.group, [])
        if not of or of[-1].number <= call.number:
            return False
        same = [each for each in of if each.number == call.number]
        since = of[-1].created - (same[0].created if same else 0)
        return of[-1].place != call.place or since > LONG_NS // 2

    @cached_property
    def primary(self) -> dict[int, list[Event]]:
        """Errors of each rank that no other rank's failure explains."""
        return {
            rank: [event for event in dump.events if self._is_primary(rank, event)]
            for rank, dump in self.dumps.ranks.items()
        }

    def _is_primary(self, rank: int, event: Event) -> bool:
        if not _SECONDARY.isdisjoint((event.type, *event.chain)):
            return False
        if event.own or event.raised or "RuntimeError" not in (event.type, *event.chain):
            return not event.waited
        # Gloo raises plain RuntimeErrors in C++, as operators, argument checks, and the comparison
        # of models do: it is none of Gloo's if nothing had happened that Gloo would report
        if event.waited and (self.dumps.ranks[rank].pending or event.call in _UNRECORDED):
            return False
        return not self.is_explained(rank, event)

    def is_explained(self, rank: int, event: Event) -> bool:
        """Return True if another rank failed or ended before, or if this one waited for long."""
        for call in self.dumps.ranks[rank].pending:
            if event.time - call.created > LONG_NS:
                return True
        for other in self.dumps.world:
            if other == rank:
                continue
            seen = self.dumps.ranks.get(other)
            if seen is not None and not self.dumps.same_clock([rank, other]):
                return True
            if seen is None and other not in self.dumps.traces:
                return True  # nothing is known of it
            if min(self.fails_at(other), self.ends_at(other)) <= event.time:
                return True
        return False

    def fails_at(self, rank: int) -> int:
        """Return the time of a rank's first error; the end of time if it had none."""
        dump = self.dumps.ranks.get(rank)
        return min((event.time for event in dump.events), default=NEVER) if dump else NEVER

    @cached_property
    def first_failure(self) -> int:
        """Time of the first error of any rank."""
        return min((self.fails_at(rank) for rank in self.dumps.ranks), default=NEVER)

    # -- processes -------------------------------------------------------------------------------

    @cached_property
    def states(self) -> dict[int, str]:
        """Newest state of each process, as others have recorded it."""
        states: dict[int, str] = {}
        for dump in sorted(self.dumps.ranks.values(), key=lambda dump: dump.taken):
            states |= dump.peers
        for rank, found in self.dumps.kernel.items():
            if str(found.get("state", "")).startswith("stopped"):
                states[rank] = str(found["state"])
        return states

    def is_over(self, rank: int) -> bool:
        """Return True if a rank's process is known to have ended."""
        dump = self.dumps.ranks.get(rank)
        return (
            rank in self.dumps.exits
            or rank in self.dumps.crashes
            or self.states.get(rank) in ENDED
            or (dump is not None and dump.reason == "exit")
        )

    def ends_at(self, rank: int) -> int:
        """Return the earliest time when a process may have ended; the end of time if it runs.

        A process that was killed has ended after its last beat.
        """
        dump, trace = self.dumps.ranks.get(rank), self.trace(rank)
        if dump is not None and dump.reason == "exit":
            return dump.ended or dump.taken
        if rank in self.dumps.crashes:
            return self.dumps.crashes[rank].time
        if not self.is_over(rank):
            return NEVER
        seen = max((d.alive.get(rank, 0) for d in self.dumps.ranks.values()), default=0)
        taken = dump.taken if dump is not None else 0
        return max(seen, taken, trace.beat if trace is not None else 0)

    def trace(self, rank: int) -> Trace | None:
        """Return a rank's ring file, if it is of the process that wrote the dump."""
        trace, dump = self.dumps.traces.get(rank), self.dumps.ranks.get(rank)
        if trace is not None and dump is not None and dump.pid not in (0, trace.pid):
            return None
        return trace

    def last_stack(self, rank: int) -> list[dict[str, Any]]:
        """Return the main thread's frames at the last beat, unless the rank went on after it."""
        trace = self.dumps.traces.get(rank)
        if trace is None or not trace.beat:
            return []
        if trace.calls:
            return trace.stack if trace.calls[-1]["begin"] <= trace.beat else []
        return trace.stack if any(trace.counts.values()) else []

    def stopped_beating(self, rank: int) -> int | None:
        """Return when a process stopped running Python though it has not ended; None if it runs.

        It is compared with the beats of others on this clock: the longest-living of them.
        """
        trace = self.trace(rank)
        others = [self.trace(r) for r in self.dumps.world if r != rank]
        newest = max([t.beat for t in others if t is not None and t.beat], default=0)
        newest = max([newest, *(d.taken for d in self.dumps.ranks.values())])
        if trace is None or not trace.beat or self.is_over(rank) or rank not in self.dumps.kernel:
            return None
        return trace.beat if newest - trace.beat > _BEATS_NS else None

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
                    silent = tuple(r for r in absent if not self._was_written_since(r, calls))
                    missing = tuple(r for r in absent if r not in silent)
                    gaps.append(Gap(group, number, calls, missing, silent))
                    break
        return sorted(gaps, key=lambda gap: min(map(_created, gap.calls.values())))

    def _was_written_since(self, rank: int, calls: Mapping[int, Call]) -> bool:
        """Return True if a rank wrote its dump after others' calls, or at its end."""
        dump = self.dumps.ranks.get(rank)
        if dump is None or dump.reason == "exit":
            return dump is not None
        known = dump.taken and self.dumps.same_clock([rank, *calls])
        return not known or dump.taken > min(map(_created, calls.values()))

    def standing(self, rank: int) -> Standing | None:
        """Return the call in which a rank waits for others; None if none, or if it is unknown."""
        dump = self.dumps.ranks.get(rank)
        if dump is None:
            return _stands_in(self.dumps.stacks.get(rank, ()))
        if dump.pending:
            call = dump.pending[0]
            return Standing(call.op, call.filename, call.line, f"in the {name_call(call)}")
        for of, message in self.dumps.messages:
            if of == rank and message["state"] != "completed" and message["op"] == "recv":
                frame = message["frames"][0]
                words = f"for a message from rank {message['peer']} {name_place(frame)}"
                return Standing("recv", *_at(frame), words, int(message["peer"]))
        failed = self._failed_in(rank, dump)
        return failed or (None if dump.reason == "exit" else _stands_in(dump.stack))

    def _failed_in(self, rank: int, dump: RankDump) -> Standing | None:
        """Return the call in which a rank waited when its last error was raised."""
        if not dump.events or dump.events[-1] in self.primary[rank]:
            return None
        event = dump.events[-1]
        if was_interrupted(event) or not event.lines:
            return None
        return _standing("" if event.call in _OF_HANDLES else event.call, event.lines[0])

    def is_victim(self, rank: int) -> bool:
        """Return True if another rank's failure explains all errors of a rank."""
        dump = self.dumps.ranks[rank]
        if not dump.events or self.primary[rank]:
            return False
        interrupted = [
            r for r, d in self.dumps.ranks.items() if d.events and was_interrupted(d.events[-1])
        ]
        return interrupted != [rank]  # an interrupt of all ranks hits them anywhere

    def has_failed(self) -> bool:
        """Return True if a rank had an error, ended with a code, or never came."""
        codes = any(exit_.code for exit_ in self.dumps.exits.values())
        return codes or bool(self.gaps) or any(d.events for d in self.dumps.ranks.values())

    def makes_progress(self) -> bool:
        """Return True if no rank has failed or ended, or has waited for more than a second."""
        dumps = self.dumps
        if any(d.events or d.reason == "exit" for d in dumps.ranks.values()) or dumps.crashes:
            return False
        if dumps.exits or dumps.kernel or any(map(self.is_over, dumps.world)):
            return False
        waits = [d.taken - call.created for d in dumps.ranks.values() for call in d.pending]
        started = any(d.calls for d in dumps.ranks.values())
        return started and max(waits, default=0) < LONG_NS

    def where_ranks_are(self) -> tuple[str, ...]:
        """Return a line about each rank's last call."""
        return tuple(
            f"rank {rank}: {last_call(self.dumps, rank, None)}" for rank in self.dumps.ranks
        )


NEVER = 1 << 63


def waits_for_others(stack: Sequence[Mapping[str, Any]]) -> bool:
    """Return True if the innermost code of a stack communicates."""
    for frame in stack:
        filename = str(frame["filename"])
        if is_users(frame):
            return False
        if "/site-packages/" in filename or not any(part in filename for part in _STANDARD):
            return any(part in filename for part in _COMMUNICATION)
    return False


def was_interrupted(event: Event) -> bool:
    """Return True if a rank was interrupted in its own code, not in a wait for others."""
    return event.type == "KeyboardInterrupt" and not event.call and not event.waited


def _may_be_of_a_wait(event: Event) -> bool:
    types = {event.type, *event.chain}
    return event.waited or "RuntimeError" in types or not _SECONDARY.isdisjoint(types)


def _is_at(event: Event, call: Call) -> bool:
    """Return True if an error may be that of a call: raised in its line, or by a handle."""
    lines = [_at(line) for line in event.lines]
    return not lines or event.call in _OF_HANDLES or call.place in lines


def _stands_in(stack: Sequence[Mapping[str, Any]]) -> Standing | None:
    if not waits_for_others(stack):
        return None
    called = ""
    for frame in stack:
        if is_users(frame):
            return _standing(called, frame)
        if any(part in str(frame["filename"]) for part in _COMMUNICATION):
            called = str(frame["name"]) if frame["name"] != "wrapper" else called
    return None


def _standing(op: str, frame: Mapping[str, Any]) -> Standing:
    return Standing(op, *_at(frame), f"in {op or 'a call'} {name_place(frame)}")


def _at(frame: Mapping[str, Any]) -> tuple[str, int]:
    return str(frame["filename"]), int(frame["line"])


def _created(call: Call) -> int:
    return call.created
