"""What a trace says in numbers: exposed communication, the slowest bucket, who was waited for."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from gradwire.errors import ArgumentError
from gradwire.recorder.trace.chrome import BUCKETS, COLLECTIVES, STEPS, WAITS

_MAX_BYTES = 1 << 30
Event = Mapping[str, Any]


@dataclass(frozen=True)
class RankTimes:
    """Where a rank's time went, in ms.

    Attributes:
        rank: The rank.
        steps: How many it took.
        forward, backward, exposed: The median step: computing, and waiting for communication after
            it.
        waited: For other ranks in collectives, in all.
        waited_for: By the other ranks, in all.
        sent_mb: What it sent in collectives, in MB; of buckets where those are not recorded.
    """

    rank: int
    steps: int
    forward: float
    backward: float
    exposed: float
    waited: float
    waited_for: float
    sent_mb: float


@dataclass(frozen=True)
class BucketTimes:
    """A bucket's way, in ms: the median of all steps and ranks.

    Attributes:
        index: In the order of launch.
        parameters: Its parameters.
        mb: What it sends.
        packing, in_flight, waiting: Copying gradients together; from sent to done; of that, what
            the end of the backward waited for.
    """

    index: int
    parameters: tuple[str, ...]
    mb: float
    packing: float
    in_flight: float
    waiting: float


@dataclass(frozen=True)
class Summary:
    """A trace in numbers.

    Attributes:
        ranks: Each rank's times.
        buckets: Each bucket's, the one that was waited for longest first.
        clock_error_us: By how much ranks' times may differ, at most.
        left_out: Number of records that are missing at the end, as a rank had more than it keeps.
    """

    ranks: tuple[RankTimes, ...]
    buckets: tuple[BucketTimes, ...]
    clock_error_us: float
    left_out: int = 0

    @property
    def waited_for(self) -> RankTimes | None:
        """The rank that others waited for longest; None if none was."""
        slowest = max(self.ranks, key=lambda rank: rank.waited_for, default=None)
        return slowest if slowest is not None and slowest.waited_for > 0 else None

    def as_dict(self) -> dict[str, Any]:
        """Of what JSON has."""
        return asdict(self)


def read_trace(path: Path) -> dict[str, Any]:
    """A trace that `gradwire.timeline` wrote.

    Raises:
        ArgumentError: It is none.
    """
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise ArgumentError(f"{path} is larger than 1 GiB")
        trace = json.loads(path.read_text())
        if trace["otherData"]["made by"] != "gradwire":
            raise KeyError("made by")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ArgumentError(
            f"{path} is no trace of gradwire.timeline: {type(error).__name__}: {error}"
        ) from error
    return dict(trace)


def summarize(trace: Mapping[str, Any]) -> Summary:
    """A trace in numbers."""
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    errors = trace["otherData"]["clock error, us"].values()
    ranks = tuple(_rank(rank, events) for rank in trace["otherData"]["ranks"])
    left_out = trace["otherData"].get("records left out", 0)
    return Summary(ranks, _buckets(events), max(errors, default=0.0), left_out)


def _rank(rank: int, events: Sequence[Event]) -> RankTimes:
    own = [event for event in events if event["pid"] == rank]
    steps = {
        name: [e["dur"] / 1e3 for e in own if e["tid"] == STEPS and e["name"] == name]
        for name in ("forward", "backward", "exposed communication")
    }
    waits = [event for event in events if event["tid"] == WAITS and "rank" in event["args"]]
    sent = sum(e["args"]["bytes"] for e in own if e["tid"] == COLLECTIVES)
    if not sent:
        flights = (e for e in own if e["tid"] == BUCKETS and e["name"].endswith("in flight"))
        sent = sum(e["args"]["bytes"] for e in flights)
    return RankTimes(
        rank,
        len(steps["backward"]),
        _median(steps["forward"]),
        _median(steps["backward"]),
        _median(steps["exposed communication"]),
        sum(e["dur"] for e in waits if e["pid"] == rank) / 1e3,
        sum(e["dur"] for e in waits if e["args"]["rank"] == rank) / 1e3,
        sent / 1e6,
    )


def _median(times: Sequence[float]) -> float:
    return median(times) if times else 0.0


def _buckets(events: Sequence[Event]) -> tuple[BucketTimes, ...]:
    by_bucket: dict[tuple[Any, ...], dict[str, list[float]]] = {}
    for event in events:
        args = event["args"]
        if "bucket" in args:
            key = (args["bucket"], tuple(args["parameters"]), args["bytes"])
            part = event["name"].rpartition(": ")[2] if event["tid"] == BUCKETS else "wait"
            by_bucket.setdefault(key, {}).setdefault(part, []).append(event["dur"] / 1e3)
    found = [
        BucketTimes(
            index,
            parameters,
            nbytes / 1e6,
            *(_median(times.get(part, [])) for part in ("pack", "in flight", "wait")),
        )
        for (index, parameters, nbytes), times in by_bucket.items()
    ]
    return tuple(sorted(found, key=lambda bucket: -bucket.waiting))
