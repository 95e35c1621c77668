"""Recording of a timeline: everything that begins in a block, from all ranks, in one file.

Each rank writes a part file next to the output, and rank 0 merges them. Nothing is sent between
ranks at the end, since a rank may have failed. The file is in Chrome's trace format, with a process
per rank and a lane per kind of record.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import torch.distributed as dist
from torch import Size
from torch.distributed import PrefixStore, Store

from gradwire._groups import find_store
from gradwire._processes import boot_id, wait_until
from gradwire.errors import ArgumentError, ArgumentTypeError
from gradwire.recorder import recording as r
from gradwire.recorder.groups import GroupInfo, at_end_of_job, known_groups, this_rank
from gradwire.recorder.lines import read_line
from gradwire.recorder.recording import (
    BucketRecord,
    CollectionRecord,
    Collections,
    StepRecord,
    ring,
)
from gradwire.recorder.trace import BUCKETS, COLLECTIVES, LANES, STEPS, WAITS

VARIABLE = "GRADWIRE_TIMELINE"
_WAIT_SECONDS = 30.0  # rank 0's wait for the other ranks' parts
_COLLECTION_NS = 1_000_000  # shorter ones are not recorded
_MOST = 200_000  # records per rank; later ones are only counted


class Recording:
    """Recording of this rank from now on."""

    def __init__(self, path: Path) -> None:
        self.path = path  # output file of all ranks
        self.offset = Offset(0, 0)
        self._records: list[Any] = []
        self._left_out = 0
        self._written = -1
        self._pid = os.getpid()
        self._collections = Collections(_COLLECTION_NS, _MOST)  # apart: alone, they are not written
        ring.listener = self._take

    def _take(self, record: Any) -> None:
        if not self._records and self._written < 0:
            self.forget_earlier()
        if len(self._records) < _MOST:
            self._records.append(record)
        else:
            self._left_out += 1

    def forget_earlier(self) -> None:
        """Remove this rank's part file of an earlier run that was not merged."""
        rank = this_rank()
        if rank is not None and os.getpid() == self._pid:
            with contextlib.suppress(OSError):
                self._part(rank).unlink(missing_ok=True)

    def write(self) -> None:
        """Write this rank's part; on rank 0, wait for all parts and merge them."""
        rank, count = this_rank(), len(self._records)
        if rank is None or os.getpid() != self._pid or count == self._written:
            return
        self._written = count
        groups = known_groups()
        size = len(groups["0"].ranks) if "0" in groups else rank + 1
        records = [*self._records[:count], *self._collections.records]
        part = part_of(rank, records, groups, self.offset)
        part["left_out"] = self._left_out
        _write_whole(self._part(rank), part)
        if rank == 0:
            files = [self._part(other) for other in range(size)]
            wait_until(lambda: all(file.exists() for file in files), _WAIT_SECONDS)
            there = [file for file in files if file.exists()]
            _write_whole(self.path, trace_of([json.loads(file.read_text()) for file in there]))
            for file in there:
                file.unlink()

    def stop(self) -> None:
        """Stop recording."""
        if ring.listener == self._take:
            ring.listener = None
            self._collections.stop()

    def _part(self, rank: int) -> Path:
        return self.path.with_name(f"{self.path.name}.{rank}.part")


@contextmanager
def timeline(path: str | os.PathLike[str]) -> Iterator[None]:
    """Record a timeline of each rank within a block, which all ranks enter and leave.

    Rank 0 writes one file for all ranks, on a shared file system. Perfetto (ui.perfetto.dev) and
    chrome://tracing open this trace, and `gradwire timeline` converts it to a summary and a page.
    Clocks of different hosts are compared on entry. The first 200,000 records of each rank are
    kept; the trace and its summary contain the number of missing records.

    Args:
        path: Output file, such as "run.json".

    Raises:
        ArgumentTypeError: `path` is not a path.
        ArgumentError: There is no default group, the folder of `path` does not exist, or a timeline
            is already being recorded.

    Example:
        >>> import json, pathlib, tempfile, gradwire
        >>> def train():
        ...     model = gradwire.DistributedDataParallel(torch.nn.Linear(2, 2))
        ...     with gradwire.timeline(pathlib.Path(folder) / "run.json"):
        ...         model(torch.ones(1, 2)).sum().backward()
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = run_ranks(train, world_size=2)
        ...     trace = json.loads((pathlib.Path(folder) / "run.json").read_text())
        >>> events = trace["traceEvents"]
        >>> sorted({e["name"] for e in events if e["ph"] == "X" and e["tid"] == 0})
        ['backward', 'exposed communication', 'forward']
    """
    if not isinstance(path, str | os.PathLike):
        raise ArgumentTypeError(f"path is {path!r}: pass the path of a file")
    file = Path(path).absolute()
    if not dist.is_initialized():
        raise ArgumentError("there is no default group: call init_process_group first")
    if not file.parent.is_dir():
        raise ArgumentError(f"path is {str(path)!r}, whose folder does not exist: create it first")
    if ring.listener is not None:
        raise ArgumentError("a timeline is already being recorded: leave its block first")
    recording = Recording(file)
    try:
        recording.forget_earlier()  # before ranks synchronize to compare clocks
        world = dist.group.WORLD
        store = None if world is None else find_store(world)
        if world is not None and store is not None:
            rank = world.rank()
            count = store.add(f"gradwire/timelines/{rank}", 1)  # equal on all ranks
            own_store = PrefixStore(f"gradwire/timeline/{count}", store)
            recording.offset = find_offset(own_store, rank, world.size(), this_clock())
        yield
    finally:
        recording.stop()
        recording.write()


def start_from_environment() -> None:
    """Record the whole process if GRADWIRE_TIMELINE is set to a file."""
    path = os.environ.get(VARIABLE)
    if not path or ring.listener is not None:
        return
    recording = Recording(Path(path).absolute())  # the program may change its directory

    def write() -> None:
        try:
            recording.write()
        except OSError as error:  # must not fail the end of the program
            print(f"gradwire: {VARIABLE}: no timeline was written: {error}", file=sys.stderr)

    at_end_of_job(write)
    atexit.register(write)


def _write_whole(path: Path, content: Any) -> None:
    partial = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    partial.write_text(json.dumps(content))
    os.replace(partial, path)


# -- conversion to Chrome's format ---------------------------------------------------------------

Json = dict[str, Any]
_COLLECTION = "garbage collection"


def part_of(
    rank: int, records: Sequence[Any], groups: Mapping[str, GroupInfo], offset: Offset
) -> Json:
    """Return one rank's events on rank 0's clock."""
    events: list[Json] = []
    before: StepRecord | None = None
    for record in records:
        if isinstance(record, StepRecord):
            events += _step(record, before)
            before = record
        elif isinstance(record, CollectionRecord):
            events.append(_event(STEPS, _COLLECTION, record.start, record.end))
        elif isinstance(record, BucketRecord):
            events += _bucket(record)
        else:
            events += _collective(record)
    for event in events:
        event["pid"] = rank
        event["ts"] = (event["ts"] + offset.ns) / 1e3
        event["dur"] /= 1e3
    # sorted, so that what is in another is drawn after it, and without collections before all
    others = (event["ts"] for event in events if event["name"] != _COLLECTION)
    first = min(others, default=0.0)
    kept = [event for event in events if event["name"] != _COLLECTION or event["ts"] >= first]
    kept.sort(key=lambda event: event["ts"])
    return {"rank": rank, "events": kept, "error_us": offset.error_ns / 1e3}


def trace_of(parts: Sequence[Mapping[str, Any]]) -> Json:
    """Return the trace of all ranks; times begin at 0."""
    first = min((event["ts"] for part in parts for event in part["events"]), default=0.0)
    events: list[Json] = []
    for part in parts:
        name = {"name": f"rank {part['rank']}"}
        events.append({"ph": "M", "pid": part["rank"], "name": "process_name", "args": name})
        for lane, title in enumerate(LANES):
            named = {"ph": "M", "pid": part["rank"], "tid": lane, "args": {"name": title}}
            events.append(named | {"name": "thread_name"})
        events += [event | {"ts": event["ts"] - first} for event in part["events"]]
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "made by": "gradwire",
            "ranks": [part["rank"] for part in parts],
            "clock error, us": {str(part["rank"]): part["error_us"] for part in parts},
            "records left out": sum(part.get("left_out", 0) for part in parts),
        },
    }


def _event(lane: int, name: str, start: int, end: int, **args: Any) -> Json:
    event = {"ph": "X", "tid": lane, "name": name, "ts": start, "dur": max(0, end - start)}
    return event | {"args": args}


def _step(step: StepRecord, before: StepRecord | None) -> list[Json]:
    args = {"step": step.step}
    if before is not None:
        args["cpu us"] = (step.cpu - before.cpu) // 1000  # since the step before
    spans = [
        ("between steps", before.reduced if before is not None else 0, step.forward),
        ("forward", step.forward, step.backward),
        ("backward", step.backward, step.computed),
        ("exposed communication", step.computed, step.reduced),
    ]
    return [
        _event(STEPS, name, start, end, **args)
        for name, start, end in spans
        if start and end > start
    ]


def _bucket(bucket: BucketRecord) -> list[Json]:
    if not bucket.done:
        return []
    args = {"step": bucket.step, "bucket": bucket.index, "parameters": list(bucket.names)}
    args["bytes"], name = bucket.nbytes, f"bucket {bucket.index}"
    return [
        _event(BUCKETS, f"{name}: pack", bucket.ready, bucket.packed, **args),
        _event(BUCKETS, f"{name}: send", bucket.packed, bucket.sent, **args),
        _event(BUCKETS, f"{name}: in flight", bucket.sent, bucket.done, **args),
        _event(WAITS, f"wait for {name}", bucket.waited, bucket.done, **args),
    ]


def _collective(entry: r.Entry) -> list[Json]:
    if not entry[r.ENDED]:
        return []
    info: GroupInfo | None = entry[r.GROUP].find_name()
    line = read_line((entry[r.CODE], entry[r.INSTRUCTION]))
    shapes = entry[r.INPUTS]
    numel = sum(size.numel() for size in ([shapes] if isinstance(shapes, Size) else shapes))
    nbytes = numel * entry[r.DTYPE].itemsize if entry[r.DTYPE] is not None else 0
    args = {
        "group": info.name if info else "",
        "number": entry[r.NUMBER],
        "bytes": nbytes,
        "queued us": (entry[r.STARTED] - entry[r.CREATED]) / 1e3,
        "at": f"{Path(str(line['filename'])).name}:{line['line']}",
    }
    start, end = entry[r.STARTED], entry[r.ENDED]
    events = [_event(COLLECTIVES, entry[r.OP], start, end, **args)]
    for peer, waited in (entry[r.WAITS] or {}).items():
        rank = info.ranks[peer] if info else peer
        wait = {"rank": rank, "op": entry[r.OP], "number": entry[r.NUMBER]}
        # the time within the collective is not recorded; most waiting is at its beginning
        length = min(waited, end - start)
        events.append(_event(WAITS, f"rank {rank}", start, start + length, **wait))
        start += length
    return events


# -- clocks of hosts -----------------------------------------------------------------------------

_TRIPS = 16


@dataclass(frozen=True)
class Offset:
    """Offset to add to a rank's times, with its error, half of the shortest round trip."""

    ns: int
    error_ns: int


def this_clock() -> str:
    """Return a name that is equal for processes with the same CLOCK_MONOTONIC, the kernel's."""
    return boot_id() or uuid.uuid4().hex


def find_offset(
    store: Store, rank: int, size: int, name: str, *, now: Callable[[], int] = perf_counter_ns
) -> Offset:
    """Measure the offset of this rank's clock to rank 0's; all ranks call it."""
    # the store is used only by this call; equal names denote the same clock
    store.set(f"clock/{rank}", name)
    names = [store.get(f"clock/{other}").decode() for other in range(size)]
    if rank == 0:
        # rank 0 answers each rank with a different clock, one rank after the other
        for other in range(1, size):
            for trip in range(_TRIPS if names[other] != name else 0):
                store.get(f"ask/{other}/{trip}")
                store.set(f"answer/{other}/{trip}", str(now()))
    if names[0] == name:
        return Offset(0, 0)
    found: list[Offset] = []
    for trip in range(_TRIPS):
        sent = now()
        store.set(f"ask/{rank}/{trip}", "")
        theirs = int(store.get(f"answer/{rank}/{trip}"))
        back = now()
        # the middle of the shortest round trip is the time of the answer
        found.append(Offset(theirs - (sent + back) // 2, (back - sent + 1) // 2))
    return min(found, key=lambda offset: offset.error_ns)
