"""A directory of dumps, gradwire's or torch's own, as plain records that can be compared.

Dumps are files that others may have written: a field of the wrong type is an error, not a crash.
"""

from __future__ import annotations

import ast
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gradwire.errors import ArgumentError
from gradwire.recorder.load import load

__all__ = ["Call", "Dumps", "Event", "Exit", "RankDump", "read_dumps"]

_NAME = re.compile(r"(.*?)(\d+)")
_CRASH_LINE = re.compile(r'  File "(.+)", line (\d+) in (.+)')
_UNEVEN = {"all_to_all", "all_to_all_single", "all_gather", "gather", "scatter", "reduce_scatter"}
_CORES = {
    "_all_gather_base": "all_gather_single",
    "_reduce_scatter_base": "reduce_scatter_single",
    "all_reduce_barrier": "barrier",
}


@dataclass(frozen=True)
class Call:
    """One collective of one rank.

    Attributes:
        group: Its group's name; `number` counts the group's collectives.
        op: Its name.
        sizes: Of what it sends; `dtypes` likewise.
        filename, line, function: Where it was called; "" if that is not known.
        done: Whether it has ended, well.
        created, started, ended: In ns of the wall's clock; 0 if it has not.
        waits: For whom it waited, in ns by global rank.
        parameters: Of a bucket; `step` is the reducer's.
        error: What it failed with.
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
        """The file and the line."""
        return self.filename, self.line

    @property
    def what(self) -> tuple[Any, ...]:
        """What must be equal on all ranks."""
        return (self.op, self.dtypes) if self.op in _UNEVEN else (self.op, self.dtypes, self.sizes)

    @property
    def nbytes(self) -> int:
        """What it sends."""
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
    """An error of a rank; its fields are those of `recorder.events.Event`, in the wall's ns."""

    kind: str
    type: str
    message: str
    parameters: tuple[str, ...]
    time: int
    lines: tuple[dict[str, Any], ...]


@dataclass(frozen=True)
class Exit:
    """How a rank's process ended, as its launcher saw it: a negative code is a signal's number."""

    code: int
    time: int
    oom_killed: bool = False


@dataclass
class RankDump:
    """What one rank left.

    Attributes:
        rank: The rank.
        calls: Its collectives, by group, in order.
        events: Its errors, in order.
        stack: Its main thread, the innermost frame first, when the dump was written.
        reason: Why it was written; "" in torch's own.
        peers: What other ranks' processes did then.
        taken: When it was written.
    """

    rank: int
    calls: dict[str, list[Call]]
    events: list[Event] = field(default_factory=list)
    stack: list[dict[str, Any]] = field(default_factory=list)
    reason: str = ""
    peers: dict[int, str] = field(default_factory=dict)
    taken: int = 0

    @property
    def pending(self) -> list[Call]:
        """The collectives that have not ended, the first first."""
        waiting = [call for calls in self.calls.values() for call in calls if not call.done]
        return sorted(waiting, key=lambda call: call.created)


@dataclass
class Dumps:
    """All that was found.

    Attributes:
        ranks: The dumps, by rank.
        groups: The global ranks of each group.
        descriptions: Of the groups.
        world: All ranks there should be.
        exits: Of processes, by rank; empty if no launcher wrote them.
        crashes: The main thread of ranks that crashed in C, the innermost frame first.
        messages: Between two ranks: each as its dump has it, with the rank.
    """

    ranks: dict[int, RankDump]
    groups: dict[str, list[int]]
    descriptions: dict[str, str]
    world: list[int]
    exits: dict[int, Exit]
    crashes: dict[int, tuple[str, list[dict[str, Any]]]]
    messages: list[tuple[int, dict[str, Any]]]

    def calls(self, group: str) -> dict[int, dict[int, Call]]:
        """A group's collectives, by number and rank."""
        found: dict[int, dict[int, Call]] = {}
        for rank, dump in self.ranks.items():
            for call in dump.calls.get(group, ()):
                found.setdefault(call.number, {})[rank] = call
        return dict(sorted(found.items()))


def read_dumps(directory: Path, prefix: str | None = None) -> Dumps:
    """Read a directory of dumps.

    Args:
        directory: The directory.
        prefix: What the files' names begin with; the one that most have, if None.

    Raises:
        ArgumentError: It is none, or has no dumps.
    """
    if not directory.is_dir():
        raise ArgumentError(f"{str(directory)!r} is no directory: give the one that ranks wrote to")
    files = _files(directory, prefix)
    if not files:
        raise ArgumentError(
            f"{str(directory)!r} has no dumps: files are named <prefix><rank>, such as rank_0 or "
            "nccl_trace_rank_0"
        )
    records = {rank: load(path) for rank, path in sorted(files.items())}
    try:
        return _dumps(directory, records)
    except (AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
        raise ArgumentError(
            f"a dump in {str(directory)!r} is not in torch's format: "
            f"{type(error).__name__}: {error}"
        ) from error


def _files(directory: Path, prefix: str | None) -> dict[int, Path]:
    found: dict[str, dict[int, Path]] = {}
    for path in directory.iterdir():
        match = _NAME.fullmatch(path.name)
        if match and path.is_file() and prefix in (None, match[1]):
            found.setdefault(match[1], {})[int(match[2])] = path
    return max(found.values(), key=len, default={})


def _dumps(directory: Path, records: Mapping[int, dict[str, Any]]) -> Dumps:
    groups, descriptions = _groups(records)
    extras = [record.get("gradwire", {}) for record in records.values()]
    sizes = [extra.get("world_size") or 0 for extra in extras]
    in_groups = {rank for ranks in groups.values() for rank in ranks}
    exits, crashes = _exits(directory), _crashes(directory)
    world = {*range(max(sizes, default=0)), *in_groups, *records, *exits}
    messages = [
        (rank, message)
        for rank, record in records.items()
        for message in record.get("gradwire", {}).get("messages", ())
    ]
    ranks = {rank: _rank(rank, record) for rank, record in records.items()}
    return Dumps(ranks, groups, descriptions, sorted(world), exits, crashes, messages)


def _groups(records: Mapping[int, Any]) -> tuple[dict[str, list[int]], dict[str, str]]:
    """The groups' ranks: as the dumps say, or else those that have called something in them."""
    groups: dict[str, list[int]] = {}
    descriptions: dict[str, str] = {}
    callers: dict[str, set[int]] = {}
    for rank, record in records.items():
        for name, config in record.get("pg_config", {}).items():
            ranks = [int(r) for r in ast.literal_eval(str(config["ranks"]))]
            if ranks and name:
                groups[name], descriptions[name] = ranks, str(config["desc"])
        for entry in record.get("entries", ()):
            name, desc = entry["process_group"]
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
                if of_group[-1].number == call.number:  # parts of one that torch has coalesced
                    continue
                of_group.clear()  # of an earlier group of this name
            of_group.append(call)
    extra = record.get("gradwire", {})
    wall = int(extra.get("wall_ns", 0))
    if extra.get("events"):
        _reopen_last(calls)
    return RankDump(
        rank,
        calls,
        [_event(event, wall) for event in extra.get("events", ())],
        list(next(iter(extra.get("threads", {}).values()), ())),
        str(extra.get("reason", "")),
        {int(peer): str(state) for peer, state in extra.get("peers", {}).items()},
        int(extra.get("taken_ns", 0)),
    )


def _reopen_last(calls: Mapping[str, list[Call]]) -> None:
    """Of a rank that had an error, the last call has not ended, if nobody has seen its end.

    Gloo's recorder does not tell a call that failed from one that ended well.
    """
    last = max((of[-1] for of in calls.values() if of), key=lambda c: c.created, default=None)
    if last is not None and not last.ended:
        calls[last.group][-1] = replace(last, done=False)


def _call(entry: Mapping[str, Any]) -> Call:
    name = str(entry["profiling_name"]).partition(":")[2] or str(entry["profiling_name"])
    frames = entry.get("frames") or [{"filename": "", "line": 0, "name": ""}]
    ended = entry.get("time_discovered_completed_ns") or 0
    return Call(
        str(entry["process_group"][0]),
        int(entry["collective_seq_id"]),
        str(entry.get("op", _CORES.get(name, name))),
        tuple(tuple(int(n) for n in size) for size in entry["input_sizes"]),
        tuple(dict.fromkeys(str(dtype) for dtype in entry.get("input_dtypes", ()))),
        str(frames[0]["filename"]),
        int(frames[0]["line"]),
        str(frames[0]["name"]),
        entry["state"] == "completed" or (bool(entry.get("retired")) and not entry.get("error")),
        int(entry["time_created_ns"]),
        int(entry.get("time_discovered_started_ns") or 0),
        int(ended),
        {int(r): int(waited) for r, waited in entry.get("waits_ns", {}).items()},
        tuple(str(name) for name in entry.get("parameters", ())),
        entry.get("step"),
        str(entry.get("error", "")),
    )


def _event(event: Mapping[str, Any], wall: int) -> Event:
    return Event(
        str(event["kind"]),
        str(event["type"]),
        str(event["message"]),
        tuple(str(name) for name in event["parameters"]),
        int(event["time"]) + wall,
        tuple(dict(line) for line in event["lines"]),
    )


def _exits(directory: Path) -> dict[int, Exit]:
    """What launchers wrote, one file for each host."""
    return {
        int(rank): Exit(int(e["code"]), int(e["time"]), bool(e.get("oom_killed")))
        for path in directory.glob("exits-*.json")
        for rank, e in json.loads(path.read_text()).items()
    }


def _crashes(directory: Path) -> dict[int, tuple[str, list[dict[str, Any]]]]:
    """What faulthandler wrote: why, and the main thread, which is its last."""
    found = {}
    for path in directory.glob("crash-*.txt"):
        number = path.stem.partition("-")[2]
        text = path.read_text(errors="replace")
        if not text.strip() or not number.isdecimal():  # it had no rank yet
            continue
        last = re.split(r"^(?:Current thread|Thread) .*$", text, flags=re.M)[-1]
        frames = [
            {"filename": m[1], "line": int(m[2]), "name": m[3]} for m in _CRASH_LINE.finditer(last)
        ]
        found[int(number)] = (text.splitlines()[0].removeprefix("Fatal Python error: "), frames)
    return found


def _product(size: Sequence[int]) -> int:
    product = 1
    for n in size:
        product *= n
    return product


def most_common(values: Sequence[Any]) -> Any:
    """The value that most have."""
    return Counter(values).most_common(1)[0][0]
