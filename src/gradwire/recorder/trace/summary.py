"""Summary of a trace: exposed communication, slowest buckets, and ranks that others waited for."""

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
    """Times of a rank, in ms.

    Attributes:
        rank: Rank.
        steps: Number of steps.
        forward, backward, exposed: Median times per step of forward, of backward, and of waiting
            for communication afterwards.
        waited: Total time spent waiting for other ranks in collectives.
        waited_for: Total time that other ranks spent waiting for this one.
        sent_mb: MB sent in collectives, or in buckets if collectives are not recorded.
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
    """Times of a bucket, in ms: medians over all steps and ranks.

    Attributes:
        index: Index in launch order.
        parameters: Names of its parameters.
        mb: MB sent.
        packing, in_flight, waiting: Times of packing gradients, from launch to completion, and of
            waiting at the end of backward.
    """

    index: int
    parameters: tuple[str, ...]
    mb: float
    packing: float
    in_flight: float
    waiting: float


@dataclass(frozen=True)
class Summary:
    """Summary of a trace.

    Attributes:
        ranks: Times of each rank.
        buckets: Times of each bucket, sorted by waiting time, longest first.
        clock_error_us: Maximum error between the clocks of ranks.
        left_out: Number of records beyond the limit, which are missing at the end.
    """

    ranks: tuple[RankTimes, ...]
    buckets: tuple[BucketTimes, ...]
    clock_error_us: float
    left_out: int = 0

    @property
    def waited_for(self) -> RankTimes | None:
        """Rank that others waited for longest; None if there is none."""
        slowest = max(self.ranks, key=lambda rank: rank.waited_for, default=None)
        return slowest if slowest is not None and slowest.waited_for > 0 else None

    def as_dict(self) -> dict[str, Any]:
        """Return a dict that JSON can represent."""
        return asdict(self)


def read_trace(path: Path) -> dict[str, Any]:
    """Read a trace of `gradwire.timeline`.

    Raises:
        ArgumentError: The file is not such a trace.
    """
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise ArgumentError(f"{path} is larger than 1 GiB")
        trace = json.loads(path.read_text())
        if trace["otherData"]["made by"] != "gradwire":
            raise KeyError("made by")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ArgumentError(
            f"{path} is not a trace of gradwire.timeline: {type(error).__name__}: {error}"
        ) from error
    return dict(trace)


def summarize(trace: Mapping[str, Any]) -> Summary:
    """Summarize a trace."""
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
