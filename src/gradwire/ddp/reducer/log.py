"""What can be asked of a wrapped module after a step: its buckets, what was unused, times."""

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
        parameters: Names, in the order they lie in it.
        bytes: Of their gradients.
        wait_seconds: How long the end of the last backward waited for it.
    """

    parameters: tuple[str, ...]
    bytes: int
    wait_seconds: float


@dataclass(frozen=True)
class LoggingData:
    """What a wrapped module did, as of the last step that reduced gradients.

    Attributes:
        steps: How many forwards have been followed by a reduction, or are about to be.
        buckets: In the order of launch.
        buckets_sent: How many of them had anything to send in the last step.
        rebuilt: Whether the buckets follow the order in which gradients become ready.
        unused: Parameters that no rank used in the last step; None where that is not asked
            (find_unused_parameters, static_graph).
        unused_here: Parameters that got no gradient on this rank in the last step.
        hook: The communication hook's name, or None.
        forward_seconds: From the beginning of forward to that of backward.
        backward_seconds: From the beginning of backward until its last gradient.
        exposed_seconds: From then until all gradients were reduced.
        communication_seconds: From the first bucket's launch until all gradients were reduced.
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
    """When things happened in a step, in ns, as PyTorch's reducer takes them; 0: not yet.

    Attributes:
        sent: How many buckets had anything to send.
        waits: How long the end of the backward waited for each bucket.
    """

    forward_start: int = 0
    compute_start: int = 0
    compute_end: int = 0
    comm_start: int = 0
    comm_end: int = 0
    sent: int = 0
    waits: list[int] = field(default_factory=list)

    def start(self) -> None:
        """A forward begins."""
        self.forward_start = perf_counter_ns()
        self.compute_start = self.compute_end = self.comm_start = self.comm_end = 0
        self.waits = []

    def seconds(self) -> dict[str, float]:
        """The last step's times, of what has ended."""
        spans = {
            "forward_seconds": (self.forward_start, self.compute_start),
            "backward_seconds": (self.compute_start, self.compute_end),
            "exposed_seconds": (self.compute_end, self.comm_end),
            "communication_seconds": (self.comm_start, self.comm_end),
        }
        return {name: max(0, end - start) / 1e9 for name, (start, end) in spans.items()}

    def buckets(self, buckets: Iterable[Bucket]) -> tuple[BucketLog, ...]:
        """The buckets with the time that the last step waited for each."""
        return tuple(
            BucketLog(tuple(b.names), sum(p.nbytes for p in b.parameters), wait / 1e9)
            for b, wait in zip(buckets, chain(self.waits, repeat(0)), strict=False)
        )
