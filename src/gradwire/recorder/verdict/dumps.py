"""Contents of dumps, as plain records that can be compared."""

from __future__ import annotations

import ast
import contextlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from gradwire.errors import ArgumentError
from gradwire.recorder.files import FIRST, PREFIX, RING, STACKS, load, read_ring

_UNEVEN = {"all_to_all", "all_to_all_single", "all_gather", "gather", "scatter", "reduce_scatter"}


@dataclass(frozen=True)
class Call:
    """Collective of one rank.

    Attributes:
        group: Name of the group.
        number: Number of the collective in the group.
        op: Name of the operation.
        sizes, dtypes: Sizes and dtypes of the tensors sent.
        filename, line, function: Line that called it; "" if unknown.
        done: True if it has ended without an error.
        created, started, ended: Wall-clock times in ns; 0 if not yet.
        waits: Time spent waiting for each global rank, in ns.
        parameters: Parameters of its bucket.
        step: Number of the reducer's backward pass.
        error: Error it failed with.
    """

    group: str
    number: int
    op: str
    sizes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    filename: str
    line: int
    function: str
    done: bool
    created: int
    started: int
    ended: int
    waits: Mapping[int, int]
    parameters: tuple[str, ...]
    step: int | None
    error: str

    @property
    def place(self) -> tuple[str, int]:
        """File and line."""
        return self.filename, self.line

    @property
    def what(self) -> tuple[Any, ...]:
        """Properties that must be equal on all ranks."""
        return (self.op, self.dtypes) if self.op in _UNEVEN else (self.op, self.dtypes, self.sizes)

    @property
    def nbytes(self) -> int:
        """Number of bytes sent."""
        width = _BYTES.get(self.dtypes[0], 4) if self.dtypes else 0
        return sum(_product(size) for size in self.sizes) * width


_BYTES = {
    **dict.fromkeys(("Byte", "Char", "Bool"), 1),
    **dict.fromkeys(("Half", "BFloat16", "Short"), 2),
    **dict.fromkeys(("Double", "Long", "ComplexFloat"), 8),
    "ComplexDouble": 16,
}


@dataclass(frozen=True)
class Event:
    """Error of a rank, with the fields of `recorder.events.Event` and wall-clock time in ns."""

    kind: str
    type: str
    message: str
    parameters: tuple[str, ...]
    time: int
    lines: tuple[dict[str, Any], ...]
    chain: tuple[str, ...] = ()
    waited: bool = False
    call: str = ""
    values: Mapping[int, str] = field(default_factory=dict)
    own: bool = False
    raised: bool = False
    reported: tuple[int, ...] = ()


@dataclass(frozen=True)
class Exit:
    """Exit of a rank's process, noted by its launcher; a negative code is a signal's number."""

    code: int
    time: int
    oom_killed: bool = False


@dataclass(frozen=True)
class ExitCall:
    """Call of `sys.exit` or `os._exit`, with the line that made it."""

    how: str
    code: int
    text: str
    time: int
    lines: tuple[dict[str, Any], ...]


@dataclass(frozen=True)
class Crash:
    """Report of faulthandler about a process that crashed in C.

    Attributes:
        why: Description of the signal.
        frames: Stack of the thread that crashed, innermost frame first.
        time: Time of the crash.
        in_main: True if the main thread crashed, or if it is unknown which thread did.
        in_python: True if it is known which of Python's threads crashed.
    """

    why: str
    frames: list[dict[str, Any]]
    time: int
    in_main: bool = True
    in_python: bool = True


@dataclass(frozen=True)
class Trace:
    """Contents of a rank's ring file, which survives any end of the process.

    Attributes:
        pid: Process that wrote it.
        beat: Last time when Python ran in it.
        counts: Number of collectives of each group at that time.
        stack: Frames of the main thread at that time, innermost first.
        calls: Last calls, with keys "group", "number", "op", "sizes", "dtype", "line", "begin",
            "end".
    """

    pid: int
    beat: int
    counts: Mapping[str, int]
    stack: list[dict[str, Any]]
    calls: list[dict[str, Any]]


@dataclass(frozen=True)
class Start:
    """Process that was started as a rank, with the launcher's variables.

    Attributes:
        rank, pid, host: Rank by the variables, process ID and host.
        launch: Variables when it began to form a group.
        was: Variables when it was started, if the program has changed them since.
    """

    rank: int
    pid: int
    host: str
    launch: Mapping[str, str]
    was: Mapping[str, str] = field(default_factory=dict)


@dataclass
class RankDump:
    """Dump of one rank.

    Attributes:
        rank: Rank that wrote it.
        calls: Collectives by group, in order.
        events: Errors, in order.
        stack: Stack of the main thread when the dump was written, innermost frame first.
        reason: Reason for writing it; "" in dumps of torch's recorder.
        peers: States of other ranks' processes at that time.
        taken: Time of writing; 0 if unknown.
        alive: Times when other ranks' processes were last seen alive.
        clock: Name of the clock, equal for ranks whose times are comparable; "" if unknown.
        exit: Last call of `sys.exit` or `os._exit`; None if there was none.
        kernel: System call of the main thread and of child processes, as `recorder.kernel` returns.
        pauses: Long garbage collections: begin and duration, in ns.
        silences: Times in which no Python ran: begin, end, and CPU time used, in ns.
        host, pid: Process that wrote it.
        ended: Time when its exit handlers ran; 0 if they have not.
        not_finite: Tensors with NaN or infinity that it was about to send, if that was checked.
    """

    rank: int
    calls: dict[str, list[Call]]
    events: list[Event] = field(default_factory=list)
    stack: list[dict[str, Any]] = field(default_factory=list)
    reason: str = ""
    peers: dict[int, str] = field(default_factory=dict)
    taken: int = 0
    alive: dict[int, int] = field(default_factory=dict)
    clock: str = ""
    exit: ExitCall | None = None
    kernel: Mapping[str, Any] = field(default_factory=dict)
    pauses: list[tuple[int, int]] = field(default_factory=list)
    silences: list[tuple[int, int, int]] = field(default_factory=list)
    host: str = ""
    pid: int = 0
    ended: int = 0
    not_finite: list[dict[str, Any]] = field(default_factory=list)

    @property
    def pending(self) -> list[Call]:
        """Collectives that have not ended, oldest first."""
        waiting = [call for calls in self.calls.values() for call in calls if not call.done]
        return sorted(waiting, key=lambda call: call.created)

    def waits_in(self, group: str) -> bool:
        """Return True if a collective of a group has not ended."""
        return any(call.group == group for call in self.pending)


@dataclass
class Dumps:
    """Contents of a directory of dumps.

    Attributes:
        ranks: Dumps by rank.
        groups: Global ranks of each group.
        descriptions: Descriptions of the groups.
        world: All ranks of the job.
        exits: Exits of processes, by rank; empty if no launcher noted them.
        crashes: Crashes in C, by rank.
        messages: Messages between two ranks, each with the rank that recorded it.
        traces: Contents of ring files, by rank.
        stacks: Stacks of the main threads of ranks that did not answer a request, by rank.
        kernel: Kernel's view of these ranks' processes, by rank.
        starts: Processes that were started as ranks.
        first: Function that reads a rank's dump at the first failure; None if there is none.
        damaged: Ranks whose dumps cannot be read.
        earlier: Ranks whose dumps belong to an earlier run; they are not in `ranks`.
    """

    ranks: dict[int, RankDump]
    groups: dict[str, list[int]]
    descriptions: dict[str, str]
    world: list[int]
    exits: dict[int, Exit]
    crashes: dict[int, Crash]
    messages: list[tuple[int, dict[str, Any]]]
    traces: dict[int, Trace] = field(default_factory=dict)
    stacks: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    kernel: dict[int, dict[str, Any]] = field(default_factory=dict)
    starts: list[Start] = field(default_factory=list)
    first: Callable[[int], RankDump | None] = lambda rank: None
    damaged: list[int] = field(default_factory=list)
    earlier: list[int] = field(default_factory=list)

    def same_clock(self, ranks: Iterable[int]) -> bool:
        """Return True if times of ranks are comparable; assumed for dumps of torch's recorder."""
        return len({self.ranks[rank].clock for rank in ranks if rank in self.ranks}) <= 1

    def calls(self, group: str) -> dict[int, dict[int, Call]]:
        """Return a group's collectives by number and rank."""
        found: dict[int, dict[int, Call]] = {}
        for rank, dump in self.ranks.items():
            for call in dump.calls.get(group, ()):
                found.setdefault(call.number, {})[rank] = call
        return dict(sorted(found.items()))


def _product(size: Sequence[int]) -> int:
    product = 1
    for n in size:
        product *= n
    return product


_MOST_RANKS = 1 << 20  # limit for damaged dumps
_NAME = re.compile(r"(.*?)(\d+)")
_CRASH_LINE = re.compile(r'  File "(.+)", line (\d+) in (.+)')
_NOT_DUMPS = (FIRST, RING.format(""))
_CORES = {
    "_all_gather_base": "all_gather_single",
    "_reduce_scatter_base": "reduce_scatter_single",
    "all_reduce_barrier": "barrier",
}


def read_dumps(directory: Path, prefix: str | None = None) -> Dumps:
    """Read a directory of dumps.

    Args:
        directory: Directory to read.
        prefix: Prefix of file names. Default: the most common one.

    Raises:
        ArgumentError: The directory does not exist or has no dumps.
    """
    if not directory.is_dir():
        raise ArgumentError(
            f"directory is {str(directory)!r}, which is not a directory: pass the one that ranks "
            "wrote to"
        )
    found = _files(directory, prefix)
    if not found:
        raise ArgumentError(
            f"{str(directory)!r} has no dumps: files are named <prefix><rank>, such as rank_0 or "
            "nccl_trace_rank_0"
        )
    errors: list[ArgumentError] = []
    for files in found:
        records, damaged = {}, {}
        for rank, path in sorted(files.items()):
            try:
                records[rank] = _checked(path, rank)
            except ArgumentError as error:
                damaged[rank] = error
        if records:
            earlier = _of_earlier_run(records)
            dumps = _dumps({r: d for r, d in records.items() if r not in earlier}, directory)
            dumps.damaged, dumps.earlier = sorted(damaged), earlier
            if prefix in (None, PREFIX):
                _add_what_outlives(dumps, directory)
            return dumps
        errors += damaged.values()
    raise errors[0]


def _of_earlier_run(records: Mapping[int, dict[str, Any]]) -> list[int]:
    """Return ranks of an earlier run with another world size, which ended before the newest began.

    Ranks that exist in both runs have replaced their dumps.
    """
    extras = {rank: record.get("gradwire", {}) for rank, record in records.items()}
    newest = max(extras.values(), key=lambda extra: int(extra.get("taken_ns", 0)))
    return [
        rank
        for rank, extra in sorted(extras.items())
        if extra.get("world_size") != newest.get("world_size")
        and extra.get("clock") == newest.get("clock")
        and int(extra.get("taken_ns", 0)) < int(newest.get("began_ns", 0))
    ]


def _checked(path: Path, rank: int) -> dict[str, Any]:
    """Load a dump and check it on its own, so that a damaged one does not hide the others."""
    record = load(path)
    try:
        _of_earlier_run({rank: record})
        _dumps({rank: record})
    except Exception as error:  # damaged dumps raise errors of any type, such as OverflowError
        raise ArgumentError(
            f"{path} is not in torch's format: {type(error).__name__}: {error}"
        ) from error
    return record


def _files(directory: Path, prefix: str | None) -> list[dict[int, Path]]:
    """Return candidate files by rank, grouped by prefix, the most common prefix first."""
    found: dict[str, dict[int, Path]] = {}
    for path in directory.iterdir():
        match = _NAME.fullmatch(path.name)
        other = match and prefix is None and match[1] in _NOT_DUMPS
        if match and not other and path.is_file() and prefix in (None, match[1]):
            found.setdefault(match[1], {})[int(match[2])] = path
    return sorted(found.values(), key=len, reverse=True)


def _dumps(records: Mapping[int, dict[str, Any]], directory: Path | None = None) -> Dumps:
    """Combine the records of ranks with the files of launchers and of faulthandler."""
    groups, descriptions = _groups(records)
    extras = [record.get("gradwire", {}) for record in records.values()]
    sizes = [extra.get("world_size") or 0 for extra in extras]
    in_groups = {rank for ranks in groups.values() for rank in ranks}
    exits, (crashes, nameless) = _exits(directory), _crashes(directory)
    world = {*range(min(max(sizes, default=0), _MOST_RANKS)), *in_groups, *records, *exits}
    silent = [r for r in world - records.keys() if not _files_of(directory, f"process-{r}.json")]
    if len(silent) == len(nameless) == 1:  # only this rank can have crashed before it had a rank
        crashes[silent[0]] = nameless[0]
    messages = [
        (rank, _message(message))
        for rank, record in records.items()
        for message in record.get("gradwire", {}).get("messages", ())
    ]
    ranks = {rank: _rank(rank, record) for rank, record in records.items()}
    return Dumps(ranks, groups, descriptions, sorted(world), exits, crashes, messages)


def _groups(records: Mapping[int, Any]) -> tuple[dict[str, list[int]], dict[str, str]]:
    """Return the ranks of groups, from the dumps' configuration or else from recorded calls."""
    groups: dict[str, list[int]] = {}
    descriptions: dict[str, str] = {}
    callers: dict[str, set[int]] = {}
    for rank, record in records.items():
        for name, config in record.get("pg_config", {}).items():
            ranks = [int(r) for r in ast.literal_eval(_text(config["ranks"]))]
            if ranks and name:
                groups[name], descriptions[name] = ranks, _text(config["desc"])
        for entry in record.get("entries", ()):
            name, desc = map(_text, entry["process_group"])
            callers.setdefault(name, set()).add(rank)
            descriptions.setdefault(name, desc)
    for name, called in callers.items():
        whole = set(records) if descriptions[name] == "default_pg" else called
        groups.setdefault(name, sorted(whole))
    return groups, descriptions


def _rank(rank: int, record: Mapping[str, Any]) -> RankDump:
    calls: dict[str, list[Call]] = {}
    for entry in record.get("entries", ()):
        if not entry.get("is_p2p"):
            call = _call(entry)
            of_group = calls.setdefault(call.group, [])
            if of_group and of_group[-1].number >= call.number:
                if of_group[-1].number == call.number:  # part of a coalesced call
                    continue
                of_group.clear()  # an earlier group of this name
            of_group.append(call)
    extra = record.get("gradwire", {})
    wall = int(extra.get("wall_ns", 0))
    return RankDump(
        rank,
        calls,
        [_event(event, wall) for event in extra.get("events", ())],
        [_frame(frame) for frame in next(iter(extra.get("threads", {}).values()), ())],
        _text(extra.get("reason", "")),
        {int(peer): _text(state) for peer, state in extra.get("peers", {}).items()},
        int(extra.get("taken_ns", 0)),
        {int(peer): int(seen) for peer, seen in extra.get("peers_alive_ns", {}).items()},
        _text(extra.get("clock", "")),
        _exit_call(extra.get("exit")),
        extra.get("kernel") or {},
        [(int(at), int(took)) for at, took in extra.get("pauses", ())],
        [(int(a), int(b), int(cpu)) for a, b, cpu in extra.get("silences", ())],
        _text(extra.get("host", "")),
        int(extra.get("pid", 0)),
        int(extra.get("ended_ns", 0)),
        [dict(each) for each in extra.get("not_finite", ())],
    )


def _exit_call(found: Mapping[str, Any] | None) -> ExitCall | None:
    if found is None:
        return None
    return ExitCall(
        _text(found["how"]),
        int(found["code"]),
        _text(found["text"]),
        int(found["time"]),
        tuple(_frame(line) for line in found["lines"]),
    )


def _call(entry: Mapping[str, Any]) -> Call:
    profiled = _text(entry["profiling_name"])
    name = profiled.partition(":")[2] or profiled
    frame = _frame((entry.get("frames") or [{"filename": "", "line": 0, "name": ""}])[0])
    step = entry.get("step")
    ended = entry.get("time_discovered_completed_ns") or 0
    return Call(
        _text(entry["process_group"][0]),
        int(entry["collective_seq_id"]),
        _text(entry.get("op", _CORES.get(name, name))),
        tuple(tuple(int(n) for n in size) for size in entry["input_sizes"]),
        tuple(dict.fromkeys(_text(dtype) for dtype in entry.get("input_dtypes", ()))),
        frame["filename"],
        frame["line"],
        frame["name"],
        entry["state"] == "completed" or (bool(entry.get("retired")) and not entry.get("error")),
        int(entry["time_created_ns"]),
        int(entry.get("time_discovered_started_ns") or 0),
        int(ended),
        {int(r): int(waited) for r, waited in entry.get("waits_ns", {}).items()},
        tuple(_text(name) for name in entry.get("parameters", ())),
        None if step is None else int(step),
        _text(entry.get("error", "")),
    )


def _event(event: Mapping[str, Any], wall: int) -> Event:
    return Event(
        _text(event["kind"]),
        _text(event["type"]),
        _text(event["message"]),
        tuple(_text(name) for name in event["parameters"]),
        int(event["time"]) + wall,
        tuple(_frame(line) for line in event["lines"]),
        tuple(_text(name) for name in event.get("chain", ())),
        bool(event.get("waited")),
        _text(event.get("call", "")),
        {int(rank): _text(value) for rank, value in event.get("values", {}).items()},
        bool(event.get("own")),
        bool(event.get("raised")),
        tuple(int(rank) for rank in event.get("reported", ())),
    )


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a message between two ranks."""
    return {
        "op": _text(message["op"]),
        "peer": int(message["peer"]),
        "state": _text(message["state"]),
        "frames": [_frame(message["frames"][0])],
    }


def _frame(frame: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {name: _text(frame[name]) for name in ("filename", "name")}
    found["line"] = int(frame["line"])
    return found | ({"user": bool(frame["user"])} if "user" in frame else {})


def _text(value: object) -> str:
    """Return a string of a dump; reject other types, whose str() may be huge."""
    if not isinstance(value, str):
        raise TypeError(f"expected a string, got a {type(value).__name__}")
    return value


def _files_of(directory: Path | None, pattern: str) -> list[Path]:
    return [] if directory is None else list(directory.glob(pattern))


def _exits(directory: Path | None) -> dict[int, Exit]:
    """Return the exits that launchers noted, one file per host."""
    paths = _files_of(directory, "exits-*.json")
    return {rank: exit_ for path in paths for rank, exit_ in _json(path).items()}


def _json(path: Path) -> dict[int, Exit]:
    """Read a launcher's file; return an empty dict if it is invalid."""
    try:
        found = json.loads(path.read_text())
        return {
            int(rank): Exit(int(e["code"]), int(e["time"]), bool(e.get("oom_killed")))
            for rank, e in found.items()
        }
    except (OSError, ValueError, AttributeError, KeyError, TypeError, RecursionError):
        return {}


def parse_stacks(text: str) -> list[tuple[bool, list[dict[str, Any]]]]:
    """Return the stacks in a report of faulthandler: if it is the current thread, and its frames.

    Frames are innermost first; the main thread comes last.
    """
    parts = re.split(r"^(Current thread|Thread) .*$", text, flags=re.M)
    if len(parts) == 1:
        parts = ["", "Current thread", text]
    return [
        (
            name.startswith("Current"),
            [
                {"filename": m[1], "line": int(m[2]), "name": m[3]}
                for m in _CRASH_LINE.finditer(content)
            ],
        )
        for name, content in zip(parts[1::2], parts[2::2], strict=True)
    ]


def _crashes(directory: Path | None) -> tuple[dict[int, Crash], list[Crash]]:
    """Read faulthandler's reports: by rank, and of processes that had no rank yet."""
    found: dict[int, Crash] = {}
    nameless = []
    for path in _files_of(directory, "crash-*.txt"):
        number = path.stem.partition("-")[2]
        text = path.read_text(errors="replace")
        stacks = parse_stacks(text) if text.strip() else []
        if not stacks:
            continue
        current = [n for n, (is_current, frames) in enumerate(stacks) if is_current and frames]
        at = current[0] if current else len(stacks) - 1  # a thread of C: show the main thread
        why = text.splitlines()[0].removeprefix("Fatal Python error: ")
        main = at == len(stacks) - 1
        crash = Crash(why, stacks[at][1], path.stat().st_mtime_ns, main, bool(current))
        if number.isdecimal():
            found[int(number)] = crash
        else:
            nameless.append(crash)
    return found, nameless


def _first(directory: Path, rank: int) -> RankDump | None:
    """Read the dump of a rank's first failure."""
    with contextlib.suppress(OSError, ArgumentError):
        return _rank(rank, _checked(directory / f"{FIRST}{rank}", rank))
    return None


def _add_what_outlives(dumps: Dumps, directory: Path) -> None:
    """Add the files that do not depend on a rank's cooperation."""
    for rank in dumps.world:
        ring = read_ring(directory / RING.format(rank))
        if ring is not None:
            state = ring["state"]
            dumps.traces[rank] = Trace(
                ring["pid"],
                ring["beat"],
                {str(name): int(n) for name, n in state.get("counts", {}).items() if n is not None},
                list(state.get("stack", ())),
                ring["calls"],
            )
        with contextlib.suppress(OSError):
            stacks = parse_stacks((directory / STACKS.format(rank)).read_text(errors="replace"))
            if stacks and stacks[-1][1]:
                dumps.stacks[rank] = stacks[-1][1]
        with contextlib.suppress(OSError, ValueError):
            dumps.kernel[rank] = json.loads((directory / f"kernel-{rank}.json").read_text())
    dumps.first = partial(_first, directory)
    for path in _files_of(directory, "start-*.json"):
        with contextlib.suppress(OSError, ValueError, KeyError):
            found = json.loads(path.read_text())
            launch = {str(name): str(value) for name, value in found["launch"].items()}
            was = {str(name): str(value) for name, value in found.get("was", {}).items()}
            dumps.starts.append(Start(found["rank"], found["pid"], str(found["host"]), launch, was))
