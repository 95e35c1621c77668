"""Summary of a trace: exposed communication, slowest buckets, and ranks that others waited for."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from statistics import median
from typing import Any

from gradwire.errors import ArgumentError

STEPS, BUCKETS, COLLECTIVES, WAITS = range(4)
LANES = ("steps", "buckets", "collectives", "waits for")
_PARTS = ("between steps", "forward", "backward", "exposed communication")
_MAX_BYTES = 1 << 30
_MORE_THAN_EQUAL = 1.2  # times an equal share
HEADINGS = ["rank", "steps", "between", "forward", "backward", "exposed", "CPU", "GC\n(sum)"]
HEADINGS += ["waited\n(sum)", "waited\nfor (sum)", "sent,\nMB"]
Slice = Mapping[str, Any]
"""Event of a trace that has a duration."""


@dataclass(frozen=True)
class RankTimes:
    """Times of a rank, in ms."""

    rank: int
    steps: int
    # medians per step: of what precedes forward, such as the optimizer and the data loader, of
    # forward, of backward, and of waiting for communication afterwards
    between: float
    forward: float
    backward: float
    exposed: float
    # median CPU time of all threads per step, from the last step's end to this one's
    cpu: float
    # sum of the times of garbage collections
    collected: float
    # sum of the times that it was in a collective before the last rank came
    waited: float
    # sum of the times that all others were in collectives before this rank, the last
    waited_for: float
    # in collectives, or in buckets if collectives are not recorded
    sent_mb: float

    @property
    def row(self) -> list[str]:
        """Row under `HEADINGS`."""
        whole, times = [self.rank, self.steps], list(vars(self).values())[2:]
        places = [2 if time < 10 else 1 if time < 100 else 0 for time in times]
        return [*map(str, whole), *(f"{t:.{n}f}" for t, n in zip(times, places, strict=True))]


@dataclass(frozen=True)
class BucketTimes:
    """Times of a bucket, in ms: medians over all steps and ranks."""

    # in launch order
    index: int
    parameters: tuple[str, ...]
    # MB sent
    mb: float
    # times of packing gradients, from launch to completion, and of waiting at the end of backward
    packing: float
    in_flight: float
    waiting: float


@dataclass(frozen=True)
class Summary:
    """Summary of a trace."""

    ranks: tuple[RankTimes, ...]
    # sorted by waiting time, longest first
    buckets: tuple[BucketTimes, ...]
    # maximum error between the clocks of ranks
    clock_error_us: float
    # number of records beyond the limit, which are missing at the end
    left_out: int = 0

    @property
    def waited_for(self) -> RankTimes | None:
        """Rank that others waited for longest; None if there is none."""
        slowest = max(self.ranks, key=lambda rank: rank.waited_for, default=None)
        return slowest if slowest is not None and slowest.waited_for > 0 else None

    @property
    def verdict(self) -> str:
        """Rank that was waited for, in one sentence."""
        slowest = self.waited_for
        if slowest is None:
            return "No rank was waited for, as far as the collectives show."
        total = sum(rank.waited_for for rank in self.ranks)
        if slowest.waited_for < _MORE_THAN_EQUAL * total / len(self.ranks):
            return (
                f"The ranks waited for each other about equally: {total:.0f} ms in all, "
                f"{slowest.waited_for:.0f} ms of it for rank {slowest.rank}."
            )
        return (
            f"The others waited for rank {slowest.rank} longest: {slowest.waited_for:.0f} ms of "
            f"{total:.0f} ms, summed over ranks and collectives."
        )


def read_trace(path: Path) -> dict[str, Any]:
    """Read a trace of `gradwire.timeline`; raise ArgumentError if the file is not one."""
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
    waits = _waits(events)
    own: dict[int, list[Slice]] = {rank: [] for rank in trace["otherData"]["ranks"]}
    for event in events:
        own[event["pid"]].append(event)
    ranks = tuple(_rank(rank, of_rank, waits) for rank, of_rank in own.items())
    left_out = trace["otherData"].get("records left out", 0)
    return Summary(ranks, _buckets(events), max(errors, default=0.0), left_out)


def _waits(events: Sequence[Slice]) -> list[tuple[int, int, float]]:
    """Return who waited for whom, and how long (ms): in each collective, for the last rank."""
    # A collective waits peer by peer, so that the first one is charged with the lateness of all.
    # Backends that do not record collectives record buckets, whose sending is their arrival.
    arrivals: dict[tuple[Any, ...], dict[int, float]] = {}
    for event in events:
        args, rank = event["args"], event["pid"]
        if event["tid"] == COLLECTIVES:
            key = "collective", args.get("group"), event["name"], args["number"]
            arrivals.setdefault(key, {})[rank] = event["ts"]
        elif event["tid"] == BUCKETS and event["name"].endswith("in flight"):
            arrivals.setdefault(("bucket", args["step"], args["bucket"]), {})[rank] = event["ts"]
    kinds = {key[0] for key in arrivals}
    found = []
    for key, times in arrivals.items():
        if len(times) > 1 and (key[0] == "collective" or len(kinds) == 1):
            last = max(times, key=times.__getitem__)
            found += [(r, last, (times[last] - at) / 1e3) for r, at in times.items() if r != last]
    return found


def _rank(rank: int, own: Sequence[Slice], waits: Sequence[tuple[int, int, float]]) -> RankTimes:
    in_steps = [event for event in own if event["tid"] == STEPS]
    steps = {
        name: [event["dur"] / 1e3 for event in in_steps if event["name"] == name]
        for name in (*_PARTS, "garbage collection")
    }
    cpu = {e["args"]["step"]: e["args"]["cpu us"] / 1e3 for e in in_steps if "cpu us" in e["args"]}
    between, forward, backward, exposed = (_median(steps[name]) for name in _PARTS)
    sent = sum(e["args"]["bytes"] for e in own if e["tid"] == COLLECTIVES)
    if not sent:
        flights = (e for e in own if e["tid"] == BUCKETS and e["name"].endswith("in flight"))
        sent = sum(e["args"]["bytes"] for e in flights)
    return RankTimes(
        rank,
        len(steps["backward"]),
        between,
        forward,
        backward,
        exposed,
        _median([*cpu.values()]),
        sum(steps["garbage collection"]),
        sum(time for waiting, _, time in waits if waiting == rank),
        sum(time for _, last, time in waits if last == rank),
        sent / 1e6,
    )


def _median(times: Sequence[float]) -> float:
    return median(times) if times else 0.0


def _buckets(events: Sequence[Slice]) -> tuple[BucketTimes, ...]:
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


def page_of(trace: Mapping[str, Any], title: str) -> str:
    """Return a trace as an HTML page with verdict, table, legend, zoom, and details on hover."""
    slices = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    events = [
        [e["pid"], e["tid"], round(e["ts"], 1), round(e["dur"], 1), e["name"], e["args"]]
        for e in slices
    ]
    summary = summarize(trace)
    data = {
        "ranks": trace["otherData"]["ranks"],
        "lanes": LANES,
        "error": summary.clock_error_us,
        "left_out": summary.left_out,
        "verdict": summary.verdict,
        "table": [HEADINGS, *(rank.row for rank in summary.ranks)],
        "worst": _longest_step(slices),
        "events": events,
    }
    template = (files("gradwire.recorder") / "page.html").read_text(encoding="utf-8")
    # only "</" and "<!--" could end the script: escape each "<"
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    before, _, after = template.partition("DATA")  # before the title, which may contain "DATA"
    return before.replace("TITLE", html.escape(title)) + text + after


def _longest_step(slices: Sequence[Slice]) -> list[float] | None:
    """Return begin and end of the step that took longest on any rank, after the first; or None."""
    spans: dict[tuple[int, int], tuple[float, float]] = {}
    for event in slices:
        if event["tid"] == STEPS and "step" in event["args"]:
            key = event["pid"], event["args"]["step"]
            begin, end = spans.get(key, (event["ts"], event["ts"]))
            spans[key] = min(begin, event["ts"]), max(end, event["ts"] + event["dur"])
    first = min((step for _, step in spans), default=0)
    later = [span for (_, step), span in spans.items() if step > first] or [*spans.values()]
    return [*max(later, key=lambda span: span[1] - span[0])] if later else None
