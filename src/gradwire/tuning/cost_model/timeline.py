"""Prediction of a step's end, with backward and communication overlapping.

The reducer launches buckets from backward's thread, in order. Backward continues after the launch
of a hook with one collective. After a hook with several, the next launch waits for the hook to
finish (`Launcher`), and backward waits with it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf

from gradwire.hooks import Message
from gradwire.tuning.cost_model.links import Burst, Cluster, collective_seconds

MOST_STEPS = 20
"""Maximum number of simulated steps until a link's credit at their beginning is constant."""


@dataclass(frozen=True)
class Cost:
    """Cost of one bucket with one hook.

    Attributes:
        before: Seconds of computing before the first collective, in backward's thread.
        messages: Collectives, in order.
        after: Seconds of computing after the first collective.
        single: True if backward continues in the meantime in any case.
    """

    before: float
    messages: tuple[Message, ...]
    after: float = 0.0
    single: bool = False

    def in_flight(self, cluster: Cluster) -> list[_Stage]:
        """Return the stages from the first collective to the end."""
        messages = [
            _Stage(collective_seconds(m, cluster), _taken(m, cluster), _busy(m, cluster))
            for m in self.messages
        ]
        return [*messages, _Stage(self.after, self.after * (1 - cluster.spare))]


@dataclass
class _Stage:
    """Part of a communication that runs beside backward.

    Attributes:
        seconds: Duration if nothing else runs and the link has full credit.
        taken: Seconds by which it slows down backward, if backward runs beside all of it.
        busy: Seconds of the link without credit.
    """

    seconds: float
    taken: float
    busy: float = 0.0

    @property
    def speed(self) -> float:
        """Relative speed of the stage and of backward while both run."""
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
    """Return the time at which all buckets have arrived, in a steady state of equal steps.

    Args:
        ready: Times at which backward alone would have each bucket's gradients: not decreasing. The
            last bucket is launched when backward has ended, so that the last entry is its end.
        costs: Cost of each bucket.
        cluster: Ranks and link; the link carries one message at a time.
        idle: Seconds between the end of a step and the beginning of the next backward, during
            which a link accumulates credit.

    Returns:
        Seconds on the clock of `ready`.

    Example:
        >>> from gradwire.tuning.cost_model import Link
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
    """Infer when backward alone would have each bucket's gradients, from a step's launch times.

    Args:
        launched: Launch times in seconds, not decreasing.
        costs: Cost of each bucket in that step, each of one collective.
        cluster: See `end_of_step`.

    Returns:
        The argument `ready` of `end_of_step`; its first entry is 0.

    Example:
        >>> from gradwire.tuning.cost_model import Curve, Link
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
    """Simulated clock of backward and of the messages in flight.

    Args:
        burst: Burst credit of the link.
        credit: Remaining credit; None for the full credit.

    Attributes:
        now: Current time in seconds.
    """

    def __init__(self, burst: Burst | None = None, credit: float | None = None) -> None:
        self.now = 0.0
        self._pending: deque[_Stage] = deque()
        self._burst = burst or Burst(0.0, {})
        self._credit = self._burst.credit if credit is None else credit
        self._counted = 0.0  # up to when

    def credit(self, *, after: float = 0.0) -> float:
        """Return the link's credit `after` seconds from now."""
        saved = self._credit + self.now - self._counted + after
        return min(self._burst.credit, max(0.0, saved))

    def start(self, stages: Iterable[_Stage]) -> None:
        """Append stages to those in flight."""
        first = not self._pending
        self._pending += stages
        if first:
            self._begin()

    def compute(self, seconds: float) -> None:
        """Advance by `seconds` of backward's computing, which stages in flight slow down."""
        while seconds > 0 and self._pending:
            seconds -= self._pass(seconds)
        self.now += max(0.0, seconds)

    def computed(self, seconds: float) -> float:
        """Advance by `seconds` of time; return the seconds that backward computes meanwhile."""
        found, end = 0.0, self.now + seconds
        while end > self.now and self._pending:
            first = self._pending[0]
            found += self._pass((end - self.now) * first.speed)
            if self._pending and self._pending[0] is first:
                return found  # the time is over; what rounding leaves of it may never come to 0
        return found + self._rest(end)

    def wait(self) -> None:
        """Advance until no stage is in flight."""
        while self._pending:
            self._end(self._pending[0].seconds)

    def _pass(self, seconds: float) -> float:
        """Compute until `seconds` are done or the first stage ends; return the seconds computed."""
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
        """End the first stage after `seconds`, and begin the next."""
        self.now += seconds
        self._pending.popleft()
        self._begin()

    def _begin(self) -> None:
        """Begin the first stage, and end all stages that take no time."""
        while self._pending:
            stage, credit = self._pending[0], self.credit()
            if stage.busy > 0:
                stage.seconds += self._burst.missing(stage.seconds, stage.busy, credit)
                self._credit, self._counted = credit - stage.busy, self.now
            if stage.seconds > 0:
                return
            self._pending.popleft()

    def _rest(self, end: float) -> float:
        """Advance to `end` with no stage in flight; return the seconds that passed."""
        seconds = max(0.0, end - self.now)
        self.now = max(self.now, end)
        return seconds


@dataclass(frozen=True)
class Choice:
    """Predicted best candidates.

    Attributes:
        names: The candidate of each bucket.
        plain_seconds: Predicted end of the step with the first candidate for all buckets.
        seconds: Predicted end of the step with `names`.
    """

    names: tuple[str, ...]
    plain_seconds: float
    seconds: float


def choose(
    ready: Sequence[float],
    candidates: Mapping[str, Sequence[Cost]],
    cluster: Cluster,
    *,
    min_gain: float = 0.0,
    idle: float = inf,
) -> Choice:
    """Return the candidate for each bucket with which the step ends earliest.

    Start from the best candidate for all buckets, then change single buckets as long as the step
    gets shorter. The choice is deterministic.

    Args:
        ready: See `end_of_step`.
        candidates: Costs of each bucket, by candidate; the first candidate is kept if no other
            choice gains enough.
        cluster: See `end_of_step`.
        min_gain: Minimum gain in seconds over the first candidate.
        idle: See `end_of_step`.

    Example:
        >>> from gradwire.tuning.cost_model import Link, Message
        >>> plain = Cost(0.0, (Message("all_reduce", 1e6),), single=True)
        >>> small = Cost(0.1, (Message("all_reduce", 1e5),), after=0.1)
        >>> candidates = {"plain": [plain], "small": [small]}
        >>> slow, fast = (Cluster(2, Link(0.0, bandwidth)) for bandwidth in (1e6, 1e8))
        >>> choose([0.0], candidates, slow).names, choose([0.0], candidates, fast).names
        (('small',), ('plain',))
    """
    names = list(candidates)
    plain = [names[0]] * len(ready)

    def seconds(chosen: Sequence[str]) -> float:
        costs = [candidates[name][i] for i, name in enumerate(chosen)]
        return end_of_step(ready, costs, cluster, idle=idle)

    best, end = plain, seconds(plain)
    before = end
    for name in names[1:]:
        if (alike := seconds([name] * len(ready))) < end:
            best, end = [name] * len(ready), alike
    changed = True
    while changed:
        changed = False
        for bucket in range(len(ready)):
            for name in names:
                other = [*best[:bucket], name, *best[bucket + 1 :]]
                if (after := seconds(other)) < end * (1 - 1e-9):
                    best, end, changed = other, after, True
    if before - end <= min_gain:
        best, end = plain, before
    return Choice(tuple(best), before, end)
