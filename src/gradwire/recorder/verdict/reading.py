"""Reading of a directory of dumps, written by gradwire or by torch's flight recorder.

Dumps may come from somebody else: fields of wrong types are errors of the dump.
"""

from __future__ import annotations

import ast
import contextlib
import json
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from gradwire.errors import ArgumentError
from gradwire.recorder.files import FIRST, PREFIX, RING, STACKS
from gradwire.recorder.load import load
from gradwire.recorder.ring_file import read_ring
from gradwire.recorder.verdict.dumps import (
    Call,
    Crash,
    Dumps,
    Event,
    Exit,
    ExitCall,
    RankDump,
    Start,
    Trace,
)

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
