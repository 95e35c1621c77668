"""Contents of a directory of dumps, written by gradwire or by torch's flight recorder.

Dumps may come from somebody else: fields of wrong types are errors of the dump.
"""

from __future__ import annotations

import ast
import contextlib
import gc
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from math import prod
from pathlib import Path
from typing import Any, TypeVar

from gradwire.errors import ArgumentError
from gradwire.recorder.files import PREFIX, RING, STACKS, ErrorRecord, load, read_ring

_MOST_RANKS = 1 << 20  # limit for damaged dumps
_NAME = re.compile(r"(.*?)(\d+)")
_RINGS = RING.format("")
_CRASH_LINE = re.compile(r'  File "(?P<filename>.+)", line (?P<line>\d+) in (?P<name>.+)')
_CORES = {
    "_all_gather_base": "all_gather_single",
    "_reduce_scatter_base": "reduce_scatter_single",
    "all_reduce_barrier": "barrier",
}
_UNEVEN = {"all_to_all", "all_to_all_single", "all_gather", "gather", "scatter", "reduce_scatter"}
_BYTES = {
    **dict.fromkeys(("Byte", "Char", "Bool"), 1),
    **dict.fromkeys(("Half", "BFloat16", "Short"), 2),
    **dict.fromkeys(("Double", "Long", "ComplexFloat"), 8),
    "ComplexDouble": 16,
}
Frame = Mapping[str, Any]
"""Line of a stack: keys "filename", "line", "name", and "user" if that was recorded."""
_T = TypeVar("_T")


# -- contents ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    """Collective of one rank."""

    group: str
    number: int
    op: str
    # of the tensors sent
    sizes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    # line that called it; its "filename" is "" if unknown
    frame: Frame
    # True if it has ended without an error
    done: bool
    # wall-clock times in ns; 0 if not yet
    created: int
    started: int
    ended: int
    # ns spent waiting for each global rank
    waits: Mapping[int, int]
    # of its bucket
    parameters: tuple[str, ...]
    # number of the reducer's backward pass
    step: int | None
    # error it failed with
    error: str

    @property
    def place(self) -> str:
        """File and line, as "file:line"."""
        return f"{self.frame['filename']}:{self.frame['line']}"

    @property
    def site(self) -> tuple[str, str]:
        """Operation and line."""
        return self.op, self.place

    @property
    def what(self) -> tuple[Any, ...]:
        """Properties that must be equal on all ranks."""
        return (self.op, self.dtypes) if self.op in _UNEVEN else (self.op, self.dtypes, self.sizes)

    @property
    def nbytes(self) -> int:
        """Number of bytes sent."""
        width = _BYTES.get(self.dtypes[0], 4) if self.dtypes else 0
        return sum(map(prod, self.sizes)) * width


@dataclass(frozen=True)
class Exit:
    """Exit of a rank's process, noted by its launcher; a negative code is a signal's number."""

    code: int
    oom_killed: bool = False


@dataclass(frozen=True)
class ExitCall:
    """Call of `sys.exit` or `os._exit`, with the line that made it."""

    how: str
    code: int
    text: str
    lines: list[Frame]


@dataclass(frozen=True)
class Crash:
    """Report of faulthandler about a process that crashed in C."""

    # description of the signal
    why: str
    # of the thread that crashed, innermost first
    frames: list[Frame]
    time: int
    # True if the main thread crashed, or if it is unknown which thread did
    in_main: bool
    # True if it is known which of Python's threads crashed
    in_python: bool


@dataclass(frozen=True)
class Trace:
    """Contents of a rank's ring file, which survives any end of the process."""

    pid: int
    # last time when Python ran in it; `counts` (collectives of each group) and `stack` (frames of
    # the main thread, innermost first) are of that time
    beat: int
    counts: Mapping[str, int]
    stack: list[Frame]
    # with keys "number", "op", "line", "begin", "end"
    calls: list[dict[str, Any]]


@dataclass(frozen=True)
class Start:
    """Process that was started as a rank, with the launcher's variables."""

    # by the variables
    rank: int
    pid: int
    host: str
    # variables when it began to form a group
    launch: dict[str, str]


@dataclass(frozen=True)
class Moment:
    """State of a rank when it was asked for a dump, or shortly before if it has gone on since."""

    time: int
    # of the main thread, innermost first
    stack: list[Frame]
    # system call of the main thread and of child processes
    kernel: dict[str, Any]


@dataclass
class RankDump:
    """Dump of one rank; attributes without a comment are fields of the dump."""

    # reason for writing it; "" in dumps of torch's recorder
    reason: str = ""
    # states of other ranks' processes at that time
    peers: dict[int, str] = field(default_factory=dict)
    taken_ns: int = 0
    # since when the main thread had been in its line
    since_ns: int = 0
    # times when other ranks' processes were last seen alive
    peers_alive_ns: dict[int, int] = field(default_factory=dict)
    # name of the clock, equal for ranks whose times are comparable; "" if unknown
    clock: str = ""
    # last call of `sys.exit` or `os._exit`
    exit: ExitCall | None = None
    # at requests, oldest first
    moments: list[Moment] = field(default_factory=list)
    # of the moment that counts; see `Evidence`
    kernel: dict[str, Any] = field(default_factory=dict)
    # long garbage collections: begin and duration, in ns
    pauses: list[tuple[int, ...]] = field(default_factory=list)
    # times in which no Python ran: begin, end, and CPU time used, in ns
    silences: list[tuple[int, ...]] = field(default_factory=list)
    host: str = ""
    pid: int = 0
    # time when its exit handlers ran; 0 if they have not
    ended_ns: int = 0
    world_size: int = 0
    # tensors with NaN or infinity that it was about to send, if that was checked
    not_finite: list[dict[str, Any]] = field(default_factory=list)
    events: list[ErrorRecord] = field(default_factory=list)
    # of the main thread when the dump was written, innermost frame first
    stack: list[Frame] = field(default_factory=list)
    # collectives by group, in order
    calls: dict[str, list[Call]] = field(default_factory=dict)
    # messages between two ranks
    messages: list[dict[str, Any]] = field(default_factory=list)
    # ranks of each group that it knows, and groups that it has called, with their descriptions
    groups: dict[str, list[int]] = field(default_factory=dict)
    called: dict[str, str] = field(default_factory=dict)

    @property
    def pending(self) -> list[Call]:
        """Collectives that have not ended, oldest first."""
        waiting = [call for calls in self.calls.values() for call in calls if not call.done]
        return sorted(waiting, key=lambda call: call.created)


@dataclass
class Dumps:
    """Contents of a directory of dumps; dicts other than `groups` are by rank."""

    ranks: dict[int, RankDump]
    # global ranks of each group, by its name
    groups: dict[str, list[int]]
    # all ranks of the job
    world: list[int]
    # exits of processes; empty if no launcher noted them
    exits: dict[int, Exit] = field(default_factory=dict)
    crashes: dict[int, Crash] = field(default_factory=dict)
    traces: dict[int, Trace] = field(default_factory=dict)
    # main threads' stacks, and the kernel's view, of ranks that did not answer a request
    stacks: dict[int, list[Frame]] = field(default_factory=dict)
    kernel: dict[int, dict[str, Any]] = field(default_factory=dict)
    starts: list[Start] = field(default_factory=list)
    # ranks whose dumps cannot be read
    damaged: list[int] = field(default_factory=list)
    # results of `calls`; cleared when they change
    numbered: dict[str, dict[int, dict[int, Call]]] = field(default_factory=dict)

    def same_clock(self, ranks: Iterable[int]) -> bool:
        """Return True if times of ranks are comparable; assumed for dumps of torch's recorder."""
        return len({self.ranks[rank].clock for rank in ranks if rank in self.ranks}) <= 1

    def calls(self, group: str) -> dict[int, dict[int, Call]]:
        """Return a group's collectives by number and rank."""
        if group not in self.numbered:
            found: dict[int, dict[int, Call]] = {}
            for rank, dump in self.ranks.items():
                for call in dump.calls.get(group, ()):
                    found.setdefault(call.number, {})[rank] = call
            self.numbered[group] = dict(sorted(found.items()))
        return self.numbered[group]


# -- the directory -------------------------------------------------------------------------------


def read_dumps(directory: Path, prefix: str | None = None) -> Dumps:
    """Read a directory of dumps; without a prefix of file names, the most common one counts."""
    if not directory.is_dir():
        raise ArgumentError(
            f"directory is {str(directory)!r}, which is not a directory: pass the one that ranks "
            "wrote to"
        )
    candidates: dict[str, dict[int, Path]] = {}
    for path in directory.iterdir():
        match = _NAME.fullmatch(path.name)
        name = match[1] if match else ""
        if match and path.is_file() and prefix in (name, None) and (prefix or name != _RINGS):
            candidates.setdefault(name, {})[int(match[2])] = path
    if not candidates:
        raise ArgumentError(
            f"{str(directory)!r} has no dumps: files are named <prefix><rank>, such as rank_0 or "
            "nccl_trace_rank_0"
        )
    errors: list[ArgumentError] = []
    for files in sorted(candidates.values(), key=len, reverse=True):
        ranks, damaged = {}, []
        for rank, path in sorted(files.items()):
            try:
                ranks[rank] = _checked(path)
            except ArgumentError as error:
                damaged.append(rank)
                errors.append(error)
        if ranks:
            dumps = _combined(ranks)
            dumps.damaged = damaged
            _add_files(dumps, directory, outliving=prefix in (None, PREFIX))
            return dumps
    raise errors[0]


def _checked(path: Path) -> RankDump:
    """Load a dump and check it on its own, so that a damaged one does not hide the others."""
    record = load(path)
    gc.disable()  # objects of dumps live until the end
    try:
        return _rank(record)
    except Exception as error:  # damaged dumps raise errors of any type, such as OverflowError
        raise ArgumentError(
            f"{path} is not in torch's format: {type(error).__name__}: {error}"
        ) from error
    finally:
        gc.enable()


def _combined(ranks: dict[int, RankDump]) -> Dumps:
    """Combine ranks' dumps; groups are those of the configuration, or else of recorded calls."""
    groups: dict[str, list[int]] = {}
    callers: dict[str, list[int]] = {}
    for rank, dump in ranks.items():
        groups |= dump.groups
        for name, desc in dump.called.items():
            of_all = desc == "default_pg"
            callers[name] = sorted(ranks if of_all else [*callers.get(name, ()), rank])
    groups = callers | groups
    size = max((dump.world_size for dump in ranks.values()), default=0)
    in_groups = {rank for members in groups.values() for rank in members}
    world = {*range(min(size, _MOST_RANKS)), *in_groups, *ranks}
    return Dumps(ranks, groups, sorted(world))


def _rank(record: Mapping[str, Any]) -> RankDump:
    extra = record.get("gradwire", {})
    apart = ("events", "messages", "kernel")
    dump = _read(RankDump, {k: v for k, v in extra.items() if v is not None and k not in apart})
    dump.stack = [_frame(frame) for frame in next(iter(extra.get("threads", {}).values()), ())]
    for event in extra.get("events", ()):
        dump.events.append(_read(ErrorRecord, event))
        dump.events[-1].time += int(extra.get("wall_ns", 0))
        dump.events[-1].since += int(extra.get("wall_ns", 0)) if dump.events[-1].since else 0
    for message in extra.get("messages", ()):
        dump.messages.append({name: _text(message[name]) for name in ("op", "state")})
        dump.messages[-1] |= {"peer": int(message["peer"]), "frame": _frame(message["frames"][0])}
    for name, config in record.get("pg_config", {}).items():
        members = [int(r) for r in ast.literal_eval(_text(config["ranks"]))]
        if members and name:
            dump.groups[name] = members
    for entry in record.get("entries", ()):
        name, desc = map(_text, entry["process_group"])
        dump.called.setdefault(name, desc)
        if not entry.get("is_p2p"):
            call = _call(entry)
            of_group = dump.calls.setdefault(call.group, [])
            if of_group and of_group[-1].number >= call.number:
                if of_group[-1].number == call.number:  # part of a coalesced call
                    continue
                of_group.clear()  # an earlier group of this name
            of_group.append(call)
    return dump


def _call(entry: Mapping[str, Any]) -> Call:
    profiled = _text(entry["profiling_name"])
    name = profiled.partition(":")[2] or profiled
    step = entry.get("step")
    return Call(
        _text(entry["process_group"][0]),
        int(entry["collective_seq_id"]),
        _text(entry.get("op", _CORES.get(name, name))),
        tuple(tuple(int(n) for n in size) for size in entry["input_sizes"]),
        tuple(dict.fromkeys(_text(dtype) for dtype in entry.get("input_dtypes", ()))),
        _frame((entry.get("frames") or [{"filename": "", "line": 0, "name": ""}])[0]),
        entry["state"] == "completed" or (bool(entry.get("retired")) and not entry.get("error")),
        int(entry["time_created_ns"]),
        int(entry.get("time_discovered_started_ns") or 0),
        int(entry.get("time_discovered_completed_ns") or 0),
        {int(r): int(waited) for r, waited in entry.get("waits_ns", {}).items()},
        tuple(_text(name) for name in entry.get("parameters", ())),
        None if step is None else int(step),
        _text(entry.get("error", "")),
    )


def _read(cls: type[_T], found: Mapping[str, Any]) -> _T:
    """Make a dataclass of a dict, whose values must have the fields' types."""
    kinds = {field.name: field.type for field in fields(cls)}  # type: ignore[arg-type]
    return cls(**{name: _READ[kinds[name]](found[name]) for name in kinds if name in found})


def _frame(frame: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {name: _text(frame[name]) for name in ("filename", "name")}
    found["line"] = int(frame["line"])
    found["filename"] = found["filename"].replace("\\", "/")  # of Windows
    return found | ({"user": bool(frame["user"])} if "user" in frame else {})


def _text(value: object) -> str:
    """Return a string of a dump; reject other types, whose str() may be huge."""
    if not isinstance(value, str):
        raise TypeError(f"expected a string, got a {type(value).__name__}")
    return value


_READ: dict[Any, Callable[[Any], Any]] = {
    "bool": bool,
    "int": int,
    "str": _text,
    "list[int]": lambda found: [int(each) for each in found],
    "list[str]": lambda found: [_text(each) for each in found],
    "list[Frame]": lambda found: [_frame(each) for each in found],
    "list[Line]": lambda found: [_frame(each) for each in found],
    "list[tuple[int, ...]]": lambda found: [tuple(int(n) for n in each) for each in found],
    "list[dict[str, Any]]": lambda found: [dict(each) for each in found],
    "dict[int, int]": lambda found: {int(key): int(value) for key, value in found.items()},
    "dict[int, str]": lambda found: {int(key): _text(value) for key, value in found.items()},
    "dict[str, str]": lambda found: {_text(key): _text(value) for key, value in found.items()},
    "dict[str, Any]": dict,
    "list[Moment]": lambda found: [_read(Moment, each) for each in found],
    "ExitCall | None": lambda found: _read(ExitCall, found),
}
"""Conversion of a field of a dump, by the annotation of the attribute."""


# -- files that do not depend on a rank's cooperation --------------------------------------------


def _add_files(dumps: Dumps, directory: Path, *, outliving: bool) -> None:
    """Add the files of launchers and of faulthandler, and those that outlive the ranks."""
    for path in directory.glob("exits-*.json"):  # one a host
        with contextlib.suppress(*_INVALID):
            found = json.loads(path.read_text())
            dumps.exits |= {int(rank): _read(Exit, exit_) for rank, exit_ in found.items()}
    dumps.world = sorted({*dumps.world, *dumps.exits})
    for path in directory.glob("crash-*.txt"):
        text, number = path.read_text(errors="replace"), path.stem.partition("-")[2]
        stacks = parse_stacks(text) if text.strip() else []
        if not stacks or not number.isdecimal():
            continue  # a process that crashed before it had a rank
        current = [n for n, (is_current, frames) in enumerate(stacks) if is_current and frames]
        at = current[0] if current else len(stacks) - 1  # a thread of C: show the main thread
        why = text.splitlines()[0].removeprefix("Fatal Python error: ")
        in_main, when = at == len(stacks) - 1, path.stat().st_mtime_ns
        crash = Crash(why, stacks[at][1], when, in_main, in_python=bool(current))
        dumps.crashes[int(number)] = crash
    if not outliving:
        return
    for rank in dumps.world:
        ring = read_ring(directory / RING.format(rank))
        if ring is not None:
            state = ring["state"]
            counts = {str(name): int(n) for name, n in state.get("counts", {}).items() if n}
            stack = list(state.get("stack", ()))
            dumps.traces[rank] = Trace(ring["pid"], ring["beat"], counts, stack, ring["calls"])
        with contextlib.suppress(OSError):
            stacks = parse_stacks((directory / STACKS.format(rank)).read_text(errors="replace"))
            if stacks and stacks[-1][1]:
                dumps.stacks[rank] = stacks[-1][1]
        with contextlib.suppress(OSError, ValueError):
            path = directory / f"kernel-{rank}.json"
            dumps.kernel[rank] = json.loads(path.read_text()) | {"time": path.stat().st_mtime_ns}
    for path in directory.glob("process-*.json"):
        with contextlib.suppress(*_INVALID):
            dumps.starts.append(_read(Start, json.loads(path.read_text())))


_INVALID = (OSError, ValueError, AttributeError, KeyError, TypeError, RecursionError)
"""Errors of a file that is not what its name says."""


def parse_stacks(text: str) -> list[tuple[bool, list[Frame]]]:
    """Return faulthandler's stacks: True for the current thread, and its frames."""
    # frames are innermost first; the main thread comes last
    parts = re.split(r"^(Current thread|Thread) .*$", text, flags=re.M)
    if len(parts) == 1:
        parts = ["", "Current thread", text]
    stacks = []
    for name, content in zip(parts[1::2], parts[2::2], strict=True):
        found = _CRASH_LINE.finditer(content)
        frames: list[Frame] = [m.groupdict() | {"line": int(m["line"])} for m in found]
        stacks.append((name.startswith("Current"), frames))
    return stacks
