"""When a step's last bucket has arrived: backward and communication beside each other.

The reducer launches buckets from backward's thread, in order. A hook of one collective is sent, and
backward goes on. After a hook of several, the next launch waits for it (`Launcher`), and backward
with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gradwire.cost_model.links import Cluster
from gradwire.cost_model.messages import Message, collective_seconds

__all__ = ["Cost", "end_of_step"]


@dataclass(frozen=True)
class Cost:
    """What one bucket costs by one hook.

    Attributes:
        before: Seconds of computing before its first collective, in backward's thread.
        messages: Its collectives, one after another.
        after: Seconds of computing from then on.
        single: Whether backward goes on meanwhile, whatever comes next.
    """

    before: float
    messages: tuple[Message, ...]
    after: float = 0.0
    single: bool = False

    def in_flight(self, cluster: Cluster) -> float:
        """Seconds from its first collective to its end."""
        return self.after + sum(collective_seconds(m, cluster) for m in self.messages)


def end_of_step(ready: Sequence[float], costs: Sequence[Cost], cluster: Cluster) -> float:
    """When all buckets have arrived.

    Args:
        ready: When backward, undisturbed, would have each bucket's gradients: not decreasing. The
            last bucket is launched when backward has ended, so that the last entry is its end.
        costs: Of each bucket.
        cluster: What they travel over, one at a time.

    Returns:
        Seconds on the clock of `ready`.

    Example:
        >>> from gradwire.cost_model import Link
        >>> cluster = Cluster(2, Link(latency=0.0, bandwidth=1e6))
        >>> plain = Cost(0.0, (Message("all_reduce", 1e6),), single=True)
        >>> end_of_step([0.5, 1.0], [plain, plain], cluster)  # 1 s each, one after the other
        2.5
    """
    clock = _Clock(cluster.overlap)
    before, waits = 0.0, False
    for when, cost in zip(ready, costs, strict=True):
        clock.compute(when - before)
        if waits:
            clock.wait()
        clock.compute(cost.before)
        clock.pending += cost.in_flight(cluster)
        before, waits = when, not cost.single
    clock.wait()
    return clock.now


class _Clock:
    """Backward, and what is on its way beside it.

    Args:
        overlap: As of `Cluster`.

    Attributes:
        now: Seconds.
        pending: Seconds that what is on its way would still take if nothing else ran.
    """

    def __init__(self, overlap: float) -> None:
        self._speed = (1 + overlap) / 2  # of each of the two, while both run
        self.now = self.pending = 0.0

    def compute(self, seconds: float) -> None:
        """Backward goes on for so long, and longer for what is on its way."""
        both = min(seconds, self.pending)
        self.pending -= both
        self.now += both / self._speed + (seconds - both)

    def wait(self) -> None:
        """Until nothing is on its way."""
        self.now += self.pending
        self.pending = 0.0
