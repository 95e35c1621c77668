"""The collectives of a group, measured: the same numbers on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, inf
from threading import Thread
from time import sleep
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, Work

from gradwire.tuning.cost_model import Burst, Cluster, Collective, Curve, Link, find_burst, fit_link
from gradwire.tuning.meter import Meter, device_of

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
LONG_SECONDS = 0.1
"""What takes so long on a link takes little beside that from computing: it need not be measured."""


def measure_cluster(
    group: ProcessGroup,
    collectives: Iterable[Collective] | Mapping[Collective, float] = ("all_reduce",),
    *,
    thorough: bool = True,
) -> Cluster:
    """What collectives on the group cost: every rank calls, and gets the same.

    Each takes a few messages of each size, from 1 KiB up to 16 MiB or until one takes 0.1 s, each
    after some computing, as in a step. Then some of the smallest and the largest are sent beside
    as much computing, which shows what that loses by them. Where one that takes 0.1 s takes longer
    right after another, several follow each other, until the link has used up what it had saved.

    Args:
        group: At least two ranks.
        collectives: Which; or, for each, the most bytes that a rank will give: none larger is sent.
        thorough: Whether it may take some seconds; else about one: each size is sent twice, none
            after one that takes 0.03 s. Where a link saves up credit, it takes longer.

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
    meter = Meter(group, thorough=thorough)
    lines = {n: _Line(meter, n, sizes_of(n, group.size(), largest.get(n, inf))) for n in names}
    sums, *others = lines.values()
    points = sums.points()
    credit = sums.find_credit(points)
    curves: dict[str, Curve] = {sums.name: sums.curve(points)}
    for line in others:
        line.credit, line.busy = credit, sums.busy * line.widest
        curves[line.name] = line.curve(line.points())
    taken: dict[str, Curve] = {n: line.taken(curves[n]) for n, line in lines.items()}
    burst = Burst(credit, {n: line.busy for n, line in lines.items()}) if credit else None
    return Cluster(
        group.size(), _link(meter, curves[sums.name]), curves, taken, _spare(meter), burst
    )


@dataclass
class _Line:
    """One kind of collective, over the group's link.

    Attributes:
        meter: What measures.
        name: Which.
        sizes: Bytes that a rank gives, those that are measured.
        credit: Seconds that the link saves up while it rests, as far as known.
        busy: Seconds that a byte takes it without credit, or about so many; 0: unknown.
    """

    meter: Meter
    name: Collective
    sizes: list[int]
    credit: float = 0.0
    busy: float = 0.0

    @property
    def widest(self) -> int:
        """Bytes of its largest tensor, for each that a rank gives."""
        return self.meter.group.size() if self.name == "all_gather" else 1

    def points(self) -> list[tuple[float, float]]:
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
            if least >= self.meter.enough and len(points) > 1:
                break
        return points

    def find_credit(self, points: list[tuple[float, float]]) -> float:
        """What the link saves up, or 0; with the last of the points, measured after a rest."""
        nbytes, once = points[-1]
        if once < self.meter.enough:
            return 0.0
        send = sender(self.meter.group, self.name, int(nbytes))
        # where smaller ones were repeated, they may have used it up before this point
        if not self.meter.thorough and self.meter.timed(send) < SLOWER * once:
            return 0.0
        sleep(REST_SECONDS)
        times = max(LEAST, ceil(BUSY_SECONDS / once)) if self.meter.thorough else 2
        sent = self.meter.each(send, times)
        each, self.credit = find_burst(sent)
        if self.credit > 0:
            points[-1], self.busy = (nbytes, max(sent[0], points[-2][1])), each / nbytes
        return self.credit

    def curve(self, points: Sequence[tuple[float, float]]) -> Curve:
        """Through these points, and beyond by what a byte takes without credit: it sets `busy`."""
        nbytes, seconds = points[-1]
        if seconds >= self.meter.enough and self.busy * nbytes > self.credit > 0:
            self.busy = (seconds + self.credit) / nbytes  # it has used up what was saved
        return Curve(tuple(points), self.busy or None)

    def taken(self, curve: Curve) -> Curve:
        """What the smallest and the largest of these take from computing beside them."""
        sleep(self.credit)
        first, *others = curve.points
        short = [point for point in others if self.meter.thorough or point[1] < LONG_SECONDS]
        last = short[-1] if short else others[0]
        points = []
        for nbytes, seconds in (first, last):
            start = starter(self.meter.group, self.name, int(nbytes))
            times = max(1, round(seconds / self.meter.product))
            compute = self.meter.multiplying(times)

            def both(start: Any = start, compute: Any = compute) -> None:
                work = start()
                compute()
                wait(work)

            thorough = self.meter.thorough
            alone = self.meter.mean(compute) if thorough else times * self.meter.product
            took = self.meter.mean(both, self._rest(nbytes)) - alone
            points.append((nbytes, max(0.0, took)))
        return Curve(tuple(points), None if last == others[-1] else 0.0)

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
    multiply = meter.computing(meter.enough / 2)

    def both() -> None:
        other = Thread(target=multiply)
        other.start()
        multiply()
        other.join()

    alone = meter.mean(multiply)
    return min(1.0, max(0.0, 2 - meter.mean(both) / alone))


SIZES = (1 << 10, 1 << 15, 1 << 18, 1 << 20, 1 << 22, 1 << 24)
"""Bytes of the largest tensor of a collective: what a rank gives, or gets."""


def sizes_of(name: Collective, world: int, largest: float = inf) -> list[int]:
    """Bytes that a rank gives, at least two, up to the largest of interest.

    With many ranks, some are rounded up to the same.
    """
    unit = 4 * world if name == "all_to_all" else 4

    def whole(nbytes: float) -> int:
        return max(1, ceil(nbytes / unit)) * unit

    shares = (nbytes // world if name == "all_gather" else nbytes for nbytes in SIZES)
    every = list(dict.fromkeys(whole(share) for share in shares))
    # two that are next to each other would differ by noise alone
    top = whole(max(every[1], min(every[-1], largest)))
    return [*(size for size in every if size < top), top]


def starter(group: ProcessGroup, name: Collective, nbytes: int) -> Callable[[], Work | None]:
    """Starts a collective of tensors of which a rank gives so many bytes."""
    # ones: their memory has been touched
    own = torch.ones(nbytes // 4, dtype=torch.float32, device=device_of(group))
    others: dict[str, Any] = {"group": group, "async_op": True}
    if name == "all_reduce":
        return lambda: dist.all_reduce(own, **others)
    if name == "all_to_all":
        into = torch.ones_like(own)
        return lambda: dist.all_to_all_single(into, own, **others)
    received = list(own.new_ones(group.size(), len(own)).unbind())
    return lambda: dist.all_gather(received, own, **others)


def wait(work: Work | None) -> None:
    """Until it is done, with a future, as hooks do."""
    assert work is not None
    work.get_future().then(lambda done: done.value()).wait()


def sender(group: ProcessGroup, name: Collective, nbytes: int) -> Callable[[], None]:
    """Starts such a collective, and waits for it."""
    start = starter(group, name, nbytes)
    return lambda: wait(start())
