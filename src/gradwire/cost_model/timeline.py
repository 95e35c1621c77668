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
    late = free = 0.0  # how far backward is behind; when the link is free
    waits_for = 0.0  # the end of a hook of several collectives
    for when, cost in zip(ready, costs, strict=True):
        start = max(when + late, waits_for) + cost.before
        late = start - when
        free = max(start, free) + cost.in_flight(cluster)
        if not cost.single:
            waits_for = free
    return max(free, ready[-1] + late) if ready else 0.0
