"""The collectives of a group, measured: the same numbers on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import ceil, inf
from threading import Thread
from time import sleep
from typing import Any

from torch.distributed import ProcessGroup

from gradwire.cost_model import Burst, Cluster, Collective, Curve, Link, find_burst, fit_link
from gradwire.hooks.auto.meter import ENOUGH_SECONDS, Meter
from gradwire.hooks.auto.sending import bytes_of_largest, sender, sizes_of, starter, wait

__all__ = ["measure_cluster"]

SOME_SECONDS = 0.06
"""How long something is repeated to be measured."""
BEFORE_SECONDS = 0.01
"""How long ranks compute before each collective that is measured, as in a step.

Right after another one it takes half as long: threads are awake, and ranks come at the same time.
"""
SLOWER = 1.1
"""A collective that takes so much longer right after another one: the link may save up credit."""
REST_SECONDS = 0.3
"""A rest after which it has credit."""
BUSY_SECONDS, LEAST = 0.6, 3
"""How long collectives follow each other, to see what they take without credit; at least three."""


def measure_cluster(
    group: ProcessGroup,
    collectives: Iterable[Collective] | Mapping[Collective, float] = ("all_reduce",),
    *,
    seconds: float = SOME_SECONDS,
) -> Cluster:
    """What collectives on the group cost: every rank calls, and gets the same.

    Each takes a few messages of each size, from 1 KiB up to 16 MiB or until one takes 0.1 s, each
    after some computing, as in a step. Then some of the smallest and the largest are sent beside
    as much computing, which shows what that loses by them. Where one that takes 0.1 s takes longer
    right after another, several follow each other, until the link has used up what it had saved.

    Args:
        group: At least two ranks.
        collectives: Which; or, for each, the most bytes that a rank gives: none larger is sent.
        seconds: For how long each size is repeated, at least twice.

    Example:
        >>> import torch.distributed as dist
        >>> from gradwire.testing import run_ranks
        >>> def main():
        ...     cluster = measure_cluster(dist.group.WORLD)
        ...     return cluster.measured["all_reduce"].seconds(1 << 20), cluster.spare
        >>> first, second = run_ranks(main, world_size=2)
        >>> first == second
        True
    """
    largest = dict(collectives) if isinstance(collectives, Mapping) else {}
    names: list[Collective] = list(dict.fromkeys(("all_reduce", *collectives)))
    meter = Meter(group, seconds)
    lines = {n: _Line(meter, n, sizes_of(n, group.size(), largest.get(n, inf))) for n in names}
    sums, *others = lines.values()
    curves: dict[str, Curve] = {sums.name: sums.curve()}
    burst = None
    if credit := sums.find_credit(curves[sums.name]):
        for line in others:
            line.find_busy(credit, sums.busy)
        curves[sums.name] = sums.curve()  # before, the link was not let rest
        burst = Burst(credit, {n: line.busy for n, line in lines.items()})
    curves |= {line.name: line.curve() for line in others}
    taken: dict[str, Curve] = {n: line.taken(curves[n]) for n, line in lines.items()}
    return Cluster(
        group.size(), _link(meter, curves["all_reduce"]), curves, taken, _spare(meter), burst
    )


@dataclass
class _Line:
    """One kind of collective, over the group's link.

    Attributes:
        meter: What measures.
        name: Which.
        sizes: Bytes that a rank gives, those that are measured.
        credit: Seconds that the link saves up while it rests, as far as known.
        busy: Seconds that a byte takes it without credit; 0: unknown.
    """

    meter: Meter
    name: Collective
    sizes: list[int]
    credit: float = 0.0
    busy: float = 0.0

    def curve(self) -> Curve:
        """What each size takes, with all credit that there is."""
        sleep(self.credit)
        points: list[tuple[float, float]] = []
        before = self.meter.computing(BEFORE_SECONDS)
        computing, least = self.meter.mean(before), 1e-9
        for given in self.sizes:
            send = sender(self.meter.group, self.name, given)

            def step(send: Callable[[], None] = send) -> None:
                before()
                send()

            # more bytes do not take less, whatever the noise says
            least = max(least, self.meter.mean(step, self._rest(given)) - computing)
            points.append((given, least))
            if least >= ENOUGH_SECONDS and len(points) > 1:
                break
        return Curve(tuple(points), self.busy or None)

    def find_credit(self, curve: Curve) -> float:
        """What the link saves up, 0 if nothing; and what a byte takes without."""
        nbytes, once = curve.points[-1]
        if once < ENOUGH_SECONDS:
            return 0.0
        send = sender(self.meter.group, self.name, int(nbytes))
        again = self.meter.timed(send)
        if again < SLOWER * once:
            return 0.0
        sleep(REST_SECONDS)
        each, credit = find_burst(self.meter.each(send, max(LEAST, ceil(BUSY_SECONDS / again))))
        if credit > 0:
            self.credit, self.busy = credit, each / nbytes
        return credit

    def find_busy(self, credit: float, busy: float) -> None:
        """What a byte takes without credit, given that of an all_reduce."""
        self.credit, self.busy = credit, busy * bytes_of_largest(self.name, self.meter.group)
        few = [given for given in self.sizes if self.busy * given < BUSY_SECONDS / 2]
        given = max(few, default=self.sizes[0])
        times = max(LEAST, ceil((BUSY_SECONDS + credit) / (self.busy * given)))
        sleep(credit)
        sent = self.meter.each(sender(self.meter.group, self.name, given), times)
        # those that cross each other take turns: only their sum says something
        self.busy = (sum(sent) + credit) / times / given

    def taken(self, curve: Curve) -> Curve:
        """What the smallest and the largest of these take from computing beside them."""
        sleep(self.credit)
        points = []
        for nbytes, seconds in (curve.points[0], curve.points[-1]):
            start = starter(self.meter.group, self.name, int(nbytes))
            compute = self.meter.computing(seconds)

            def both(start: Any = start, compute: Any = compute) -> None:
                work = start()
                compute()
                wait(work)

            took = self.meter.mean(both, self._rest(nbytes)) - self.meter.mean(compute)
            points.append((nbytes, max(0.0, took)))
        return Curve(tuple(points))

    def _rest(self, given: float) -> float:
        """After which the link has all credit again."""
        return min(self.credit, self.busy * given)


def _link(meter: Meter, curve: Curve) -> Link:
    """As two numbers, for what was not measured."""
    first, (last, seconds) = curve.points[0], curve.points[-1]
    if curve.beyond is not None:  # up to there, credit makes it look faster
        last, seconds = 2 * last, curve.seconds(2 * last)
    return fit_link(meter.group.size(), [(int(n), s) for n, s in (first, (last, seconds))])


def _spare(meter: Meter) -> float:
    """How much of a second thread's computing costs the first one nothing."""
    multiply = meter.computing(meter.some)

    def both() -> None:
        other = Thread(target=multiply)
        other.start()
        multiply()
        other.join()

    alone = meter.mean(multiply)
    return min(1.0, max(0.0, 2 - meter.mean(both) / alone))
