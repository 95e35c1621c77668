"""When a step's last bucket has arrived: backward and communication beside each other.

The reducer launches buckets from backward's thread, in order. A hook of one collective is sent, and
backward goes on. After a hook of several, the next launch waits for it (`Launcher`), and backward
with it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gradwire.cost_model.links import Cluster
from gradwire.cost_model.messages import Message, collective_seconds

__all__ = ["Cost", "end_of_step", "undisturbed"]


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

    def in_flight(self, cluster: Cluster) -> list[_Stage]:
        """What follows from its first collective to its end."""
        messages = [
            _Stage(collective_seconds(m, cluster), _taken(m, cluster)) for m in self.messages
        ]
        return [*messages, _Stage(self.after, self.after * (1 - cluster.spare))]


@dataclass
class _Stage:
    """What goes on beside backward.

    Attributes:
        seconds: If nothing else ran.
        taken: Seconds that it takes from backward, if that runs beside all of it.
    """

    seconds: float
    taken: float

    @property
    def speed(self) -> float:
        """Of it and of backward, while both run."""
        return self.seconds / (self.seconds + self.taken)


def _taken(message: Message, cluster: Cluster) -> float:
    curve = cluster.taken.get(message.collective)
    return 0.0 if curve is None else curve.seconds(message.nbytes)


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
    clock = _Clock()
    before, waits = 0.0, False
    for when, cost in zip(ready, costs, strict=True):
        clock.compute(when - before)
        if waits:
            clock.wait()
        clock.compute(cost.before)
        clock.start(cost.in_flight(cluster))
        before, waits = when, not cost.single
    clock.wait()
    return clock.now


def undisturbed(
    launched: Sequence[float], costs: Sequence[Cost], cluster: Cluster
) -> tuple[float, ...]:
    """When backward would have each bucket's gradients, from when they were launched in a step.

    Args:
        launched: Seconds, not decreasing.
        costs: Of each bucket in that step, each of one collective.
        cluster: As `end_of_step` has it.

    Returns:
        What `end_of_step` takes; the first is 0.

    Example:
        >>> from gradwire.cost_model import Curve, Link
        >>> taken = {"all_reduce": Curve(((0, 0.0), (1e6, 1.0)))}
        >>> cluster = Cluster(2, Link(latency=0.0, bandwidth=1e6), taken=taken)
        >>> plain = Cost(0.0, (Message("all_reduce", 1e6),), single=True)
        >>> undisturbed([0.5, 3.5], [plain, plain], cluster)  # 2 s of 3 s were shared in halves
        (0.0, 2.0)
    """
    clock, ready, before = _Clock(), [0.0], launched[0]
    for when, sent, cost in zip(launched[1:], costs, costs[1:], strict=False):
        clock.start(sent.in_flight(cluster))
        ready.append(ready[-1] + max(0.0, clock.computed(when - before) - cost.before))
        before = when
    return tuple(ready)


class _Clock:
    """Backward, and what is on its way beside it.

    Attributes:
        now: Seconds.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._pending: deque[_Stage] = deque()

    def start(self, stages: Iterable[_Stage]) -> None:
        """Send something: it follows what is on its way."""
        self._pending += [stage for stage in stages if stage.seconds > 0]

    def compute(self, seconds: float) -> None:
        """Backward goes on for so long, and longer for what is on its way."""
        while seconds > 0 and self._pending:
            speed = self._pending[0].speed
            both = self._pass(seconds)
            self.now += both / speed
            seconds -= both
        self.now += max(0.0, seconds)

    def computed(self, seconds: float) -> float:
        """How much backward computes while so much time passes."""
        found = 0.0
        while seconds > 0 and self._pending:
            first = self._pending[0]
            speed = first.speed
            both = self._pass(seconds * speed)
            found += both
            if self._pending and self._pending[0] is first:
                return found  # the time is over; what rounding leaves of it may never come to 0
            seconds -= both / speed
        return found + max(0.0, seconds)

    def _pass(self, seconds: float) -> float:
        """Let the first that is on its way go on for so long, or to its end: how long."""
        stage = self._pending[0]
        if seconds >= stage.seconds:
            return self._pending.popleft().seconds
        stage.taken *= 1 - seconds / stage.seconds
        stage.seconds -= seconds
        return seconds

    def wait(self) -> None:
        """Until nothing is on its way."""
        self.now += sum(stage.seconds for stage in self._pending)
        self._pending.clear()
