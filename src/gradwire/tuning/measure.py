"""Measurement of a group's collectives, with the same result on all ranks."""

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
"""Duration of computing before each measured collective, as in a training step.

Directly after another collective it would take half as long, because threads are awake and ranks
arrive at the same time.
"""
SLOWER = 1.1
"""Ratio of a collective's times, after another one and after a rest, that indicates credit."""
REST_SECONDS = 0.3
"""Idle time after which a link has credit."""
BUSY_SECONDS, LEAST = 0.6, 3
"""Duration and minimum number of collectives in a row that measure the time without credit."""
LONG_SECONDS = 0.1
"""Duration above which the slowdown of concurrent computing is small, and not measured."""


def measure_cluster(
    group: ProcessGroup,
    collectives: Iterable[Collective] | Mapping[Collective, float] = ("all_reduce",),
    *,
    thorough: bool = True,
) -> Cluster:
    """Measure collectives on a group. Every rank must call this, and gets the same result.

    Each collective is run with several sizes, from 1 KiB to 16 MiB or until one takes 0.1 s, after
    some computing, as in a step. The smallest and the largest size are then run during computing,
    to measure by how much they slow it down. If a collective of 0.1 s takes longer directly after
    another one, several are run in a row, until the link has used up its credit (see `Burst`).

    Args:
        group: Process group of at least two ranks.
        collectives: Collectives to measure, or a mapping of collectives to the maximum input size
            in bytes.
        thorough: True for a measurement of several seconds. If False, it takes about one second:
            each size is sent twice, and none after one that takes 0.03 s. Links with credit take
            longer.

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
    """Measurement of one kind of collective on the group's link.

    Attributes:
        meter: Meter of the group.
        name: Collective.
        sizes: Input sizes in bytes to measure.
        credit: Credit of the link after a rest, in seconds, as far as known.
        busy: Approximate seconds per byte without credit; 0 if unknown.
    """

    meter: Meter
    name: Collective
    sizes: list[int]
    credit: float = 0.0
    busy: float = 0.0

    @property
    def widest(self) -> int:
        """Ratio of the size of the largest tensor to the input size."""
        return self.meter.group.size() if self.name == "all_gather" else 1

    def points(self) -> list[tuple[float, float]]:
        """Return (size, seconds) for each size, with full credit."""
        sleep(self.credit)
        points: list[tuple[float, float]] = []
        before = self.meter.computing(BEFORE_SECONDS)
        computing, least = self.meter.mean(before), 1e-9
        for given in self.sizes:
            send = sender(self.meter.group, self.name, given)

            def step(send: Callable[[], None] = send) -> None:
                before()
                send()

            # enforces times that do not decrease with the size, despite noise
            least = max(least, self.meter.mean(step, self._rest(given)) - computing)
            points.append((given, least))
            if least >= self.meter.enough and len(points) > 1:
                break
        return points

    def find_credit(self, points: list[tuple[float, float]]) -> float:
        """Return the link's credit, or 0, from collectives of the last point's size in a row.

        The last point is replaced by a measurement after a rest if there is credit.
        """
        nbytes, once = points[-1]
        if once < self.meter.enough:
            return 0.0
        send = sender(self.meter.group, self.name, int(nbytes))
        # in a thorough measurement, the repeated smaller sizes may have used up the credit
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
        """Return the curve through the points, continued at the rate without credit; set `busy`."""
        nbytes, seconds = points[-1]
        if seconds >= self.meter.enough and self.busy * nbytes > self.credit > 0:
            self.busy = (seconds + self.credit) / nbytes  # the credit was used up
        return Curve(tuple(points), self.busy or None)

    def taken(self, curve: Curve) -> Curve:
        """Return the time that the smallest and the largest size take from concurrent computing."""
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
        """Return the idle seconds after which the link has full credit again."""
        return min(self.credit, self.busy * given)


def _link(meter: Meter, curve: Curve) -> Link:
    """Fit latency and bandwidth, for collectives that were not measured."""
    first, (last, seconds) = curve.points[0], curve.points[-1]
    if curve.beyond is not None:  # the points are too fast, because of credit
        last, seconds = 2 * last, curve.seconds(2 * last)
    return fit_link(meter.group.size(), [(int(n), s) for n, s in (first, (last, seconds))])


def _spare(meter: Meter) -> float:
    """Return the fraction of a second thread's computing that does not slow down the first."""
    multiply = meter.computing(meter.enough / 2)

    def both() -> None:
        other = Thread(target=multiply)
        other.start()
        multiply()
        other.join()

    alone = meter.mean(multiply)
    return min(1.0, max(0.0, 2 - meter.mean(both) / alone))


SIZES = (1 << 10, 1 << 15, 1 << 18, 1 << 20, 1 << 22, 1 << 24)
"""Sizes in bytes of a collective's largest tensor, its input or output."""


def sizes_of(name: Collective, world: int, largest: float = inf) -> list[int]:
    """Return at least two input sizes in bytes, up to the largest of interest.

    With many ranks, several sizes may be rounded up to the same value.
    """
    unit = 4 * world if name == "all_to_all" else 4

    def whole(nbytes: float) -> int:
        return max(1, ceil(nbytes / unit)) * unit

    shares = (nbytes // world if name == "all_gather" else nbytes for nbytes in SIZES)
    every = list(dict.fromkeys(whole(share) for share in shares))
    # two adjacent sizes would differ by noise only
    top = whole(max(every[1], min(every[-1], largest)))
    return [*(size for size in every if size < top), top]


def starter(group: ProcessGroup, name: Collective, nbytes: int) -> Callable[[], Work | None]:
    """Return a function that starts a collective with an input of this size."""
    # ones, so that the memory has been touched
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
    """Wait for a collective through its future, as hooks do."""
    assert work is not None
    work.get_future().then(lambda done: done.value()).wait()


def sender(group: ProcessGroup, name: Collective, nbytes: int) -> Callable[[], None]:
    """Return a function that starts a collective and waits for it."""
    start = starter(group, name, nbytes)
    return lambda: wait(start())
