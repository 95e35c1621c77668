"""When a step's last bucket has arrived: backward and communication beside each other.

The reducer launches buckets from backward's thread, in order. A hook of one collective is sent, and
backward goes on. After a hook of several, the next launch waits for it (`Launcher`), and backward
with it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf

from gradwire.cost_model.bursts import Burst
from gradwire.cost_model.links import Cluster
from gradwire.cost_model.messages import Message, collective_seconds

__all__ = ["Cost", "end_of_step", "undisturbed"]

MOST_STEPS = 20
"""Steps until a link's credit is the same at the beginning of each, at most."""


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
            _Stage(collective_seconds(m, cluster), _taken(m, cluster), _busy(m, cluster))
            for m in self.messages
        ]
        return [*messages, _Stage(self.after, self.after * (1 - cluster.spare))]


@dataclass
class _Stage:
    """What goes on beside backward.

    Attributes:
        seconds: If nothing else ran, after a rest of the link.
        taken: Seconds that it takes from backward, if that runs beside all of it.
        busy: Seconds of the link that it takes without credit.
    """

    seconds: float
    taken: float
    busy: float = 0.0

    @property
    def speed(self) -> float:
        """Of it and of backward, while both run."""
        return self.seconds / (self.seconds + self.taken)


def _taken(message: Message, cluster: Cluster) -> float:
    curve = cluster.taken.get(message.collective)
    return 0.0 if curve is None else curve.seconds(message.nbytes)


def _busy(message: Message, cluster: Cluster) -> float:
    each = {} if cluster.burst is None else cluster.burst.busy
    return each.get(message.collective, 0.0) * message.nbytes


def end_of_step(
    ready: Sequence[float], costs: Sequence[Cost], cluster: Cluster, *, idle: float = inf
) -> float:
    """When all buckets have arrived, in one of many such steps.

    Args:
        ready: When backward, undisturbed, would have each bucket's gradients: not decreasing. The
            last bucket is launched when backward has ended, so that the last entry is its end.
        costs: Of each bucket.
        cluster: What they travel over, one at a time.
        idle: Seconds between the end of a step and the beginning of the next one's backward, in
            which a link saves up credit.

    Returns:
        Seconds on the clock of `ready`.

    Example:
        >>> from gradwire.cost_model import Link
        >>> cluster = Cluster(2, Link(latency=0.0, bandwidth=1e6))
        >>> plain = Cost(0.0, (Message("all_reduce", 1e6),), single=True)
        >>> end_of_step([0.5, 1.0], [plain, plain], cluster)  # 1 s each, one after the other
        2.5
    """
    if cluster.burst is None or idle == inf:
        return _step(ready, costs, cluster, _Clock(cluster.burst))
    credit, end = cluster.burst.credit, 0.0
    for _ in range(MOST_STEPS):
        clock = _Clock(cluster.burst, credit)
        end = _step(ready, costs, cluster, clock)
        left = clock.credit(after=idle)
        if left >= credit * (1 - 1e-6):
            break
        credit = left
    return end


def _step(ready: Sequence[float], costs: Sequence[Cost], cluster: Cluster, clock: _Clock) -> float:
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
    clock, ready, before = _Clock(cluster.burst), [0.0], launched[0]
    for when, sent, cost in zip(launched[1:], costs, costs[1:], strict=False):
        clock.start(sent.in_flight(cluster))
        ready.append(ready[-1] + max(0.0, clock.computed(when - before) - cost.before))
        before = when
    return tuple(ready)


class _Clock:
    """Backward, and what is on its way beside it.

    Args:
        burst: Of the link.
        credit: What it has of it; None: all.

    Attributes:
        now: Seconds.
    """

    def __init__(self, burst: Burst | None = None, credit: float | None = None) -> None:
        self.now = 0.0
        self._pending: deque[_Stage] = deque()
        self._burst = burst or Burst(0.0, {})
        self._credit = self._burst.credit if credit is None else credit
        self._counted = 0.0  # up to when

    def credit(self, *, after: float = 0.0) -> float:
        """What the link has, so many seconds from now: it saves up all the time."""
        saved = self._credit + self.now - self._counted + after
        return min(self._burst.credit, max(0.0, saved))

    def start(self, stages: Iterable[_Stage]) -> None:
        """Send something: it follows what is on its way."""
        first = not self._pending
        self._pending += stages
        if first:
            self._begin()

    def compute(self, seconds: float) -> None:
        """Backward goes on for so long, and longer for what is on its way."""
        while seconds > 0 and self._pending:
            seconds -= self._pass(seconds)
        self.now += max(0.0, seconds)

    def computed(self, seconds: float) -> float:
        """How much backward computes while so much time passes."""
        found, end = 0.0, self.now + seconds
        while end > self.now and self._pending:
            first = self._pending[0]
            found += self._pass((end - self.now) * first.speed)
            if self._pending and self._pending[0] is first:
                return found  # the time is over; what rounding leaves of it may never come to 0
        return found + self._rest(end)

    def wait(self) -> None:
        """Until nothing is on its way."""
        while self._pending:
            self._end(self._pending[0].seconds)

    def _pass(self, seconds: float) -> float:
        """Backward computes for so long, or until the first that is on its way ends: how long."""
        stage = self._pending[0]
        speed = stage.speed
        if seconds >= stage.seconds:
            both = stage.seconds
            self._end(both / speed)
            return both
        stage.taken *= 1 - seconds / stage.seconds
        stage.seconds -= seconds
        self.now += seconds / speed
        return seconds

    def _end(self, seconds: float) -> None:
        """The first that is on its way ends after so long, and the next begins."""
        self.now += seconds
        self._pending.popleft()
        self._begin()

    def _begin(self) -> None:
        """The first that is on its way begins; what takes no time ends, too."""
        while self._pending:
            stage, credit = self._pending[0], self.credit()
            if stage.busy > 0:
                stage.seconds += self._burst.missing(stage.seconds, stage.busy, credit)
                self._credit, self._counted = credit - stage.busy, self.now
            if stage.seconds > 0:
                return
            self._pending.popleft()

    def _rest(self, end: float) -> float:
        """Nothing is on its way until then: how long."""
        seconds = max(0.0, end - self.now)
        self.now = max(self.now, end)
        return seconds
