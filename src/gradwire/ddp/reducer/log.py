"""Information on a wrapped module's last step: buckets, unused parameters, times."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain, repeat
from time import perf_counter_ns

from gradwire.ddp.buckets.bucket import Bucket


@dataclass(frozen=True)
class BucketLog:
    """One bucket.

    Attributes:
        parameters: Names of the parameters, in the bucket's order.
        bytes: Size of their gradients.
        wait_seconds: Time that the end of the last backward waited for the bucket.
    """

    parameters: tuple[str, ...]
    bytes: int
    wait_seconds: float


@dataclass(frozen=True)
class LoggingData:
    """Record of a wrapped module's last step that reduced gradients.

    Attributes:
        steps: Number of forwards that were followed by a reduction, or are about to be.
        buckets: Buckets in launch order.
        buckets_sent: Number of buckets that had anything to send in the last step.
        rebuilt: True if the buckets follow the order in which gradients become ready.
        unused: Parameters that no rank used in the last step; None without
            `find_unused_parameters` or `static_graph`.
        unused_here: Parameters that got no gradient on this rank in the last step.
        hook: Name of the communication hook, or None.
        forward_seconds: Time from the start of forward to the start of backward.
        backward_seconds: Time from the start of backward to its last gradient.
        exposed_seconds: Time from the last gradient until all gradients were reduced.
        communication_seconds: Time from the first bucket's launch until all gradients were reduced.
    """

    steps: int
    buckets: tuple[BucketLog, ...]
    buckets_sent: int
    rebuilt: bool
    unused: tuple[str, ...] | None
    unused_here: tuple[str, ...]
    hook: str | None
    forward_seconds: float
    backward_seconds: float
    exposed_seconds: float
    communication_seconds: float


@dataclass
class StepTimer:
    """Times of the events in a step, in ns, as in PyTorch's reducer; 0 before the event.

    Attributes:
        sent: Number of buckets that had anything to send.
        waits: Time that the end of the backward waited for each bucket.
        unused_here: Names of the parameters unused on this rank.
    """

    forward_start: int = 0
    compute_start: int = 0
    compute_end: int = 0
    comm_start: int = 0
    comm_end: int = 0
    sent: int = 0
    waits: list[int] = field(default_factory=list)
    unused_here: tuple[str, ...] = ()

    def start(self) -> None:
        """Record the start of a forward."""
        self.forward_start = perf_counter_ns()
        self.compute_start = self.compute_end = self.comm_start = self.comm_end = 0
        self.waits = []

    def seconds(self) -> dict[str, float]:
        """Return the durations of the last step's phases; 0 for those that have not ended."""
        spans = {
            "forward_seconds": (self.forward_start, self.compute_start),
            "backward_seconds": (self.compute_start, self.compute_end),
            "exposed_seconds": (self.compute_end, self.comm_end),
            "communication_seconds": (self.comm_start, self.comm_end),
        }
        return {name: max(0, end - start) / 1e9 for name, (start, end) in spans.items()}

    def buckets(self, buckets: Iterable[Bucket]) -> tuple[BucketLog, ...]:
        """Return the buckets, with the time that the last step waited for each."""
        return tuple(
            BucketLog(tuple(b.names), sum(p.nbytes for p in b.parameters), wait / 1e9)
            for b, wait in zip(buckets, chain(self.waits, repeat(0)), strict=False)
        )
