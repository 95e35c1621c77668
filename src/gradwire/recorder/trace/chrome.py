"""Conversion of records to Chrome's trace format: a process per rank, a lane per kind of record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gradwire.recorder import recording as r
from gradwire.recorder.groups import GroupInfo
from gradwire.recorder.lines import read_line
from gradwire.recorder.recording import BucketRecord, CollectionRecord, StepRecord
from gradwire.recorder.trace.clocks import Offset
from gradwire.recorder.trace.summary import BUCKETS, COLLECTIVES, LANES, STEPS, WAITS

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
    events = _without_start(events)
    return {"rank": rank, "events": events, "error_us": offset.error_ns / 1e3}


def _without_start(events: list[Json]) -> list[Json]:
    """Sort events, so that what is in another is drawn after it, without collections before all."""
    others = (event["ts"] for event in events if event["name"] != _COLLECTION)
    first = min(others, default=0.0)
    kept = [event for event in events if event["name"] != _COLLECTION or event["ts"] >= first]
    return sorted(kept, key=lambda event: event["ts"])


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
    args = {
        "step": bucket.step,
        "bucket": bucket.index,
        "parameters": list(bucket.names),
        "bytes": bucket.nbytes,
    }
    name = f"bucket {bucket.index}"
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
    args = {
        "group": info.name if info else "",
        "number": entry[r.NUMBER],
        "bytes": _nbytes(entry),
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


def _nbytes(entry: r.Entry) -> int:
    shapes = entry[r.INPUTS]
    if entry[r.DTYPE] is None:
        return 0
    sizes = [shapes] if hasattr(shapes, "numel") else shapes
    return int(sum(size.numel() for size in sizes) * entry[r.DTYPE].itemsize)
