"""Links as two numbers: cost per message and cost per byte (the α-β model).

Source:
    R. W. Hockney, The communication challenge for MPP, 1994.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

from gradwire.errors import ArgumentError
from gradwire.hooks import Message


@dataclass(frozen=True)
class Link:
    """A full-duplex link of one host, or of one rank.

    Args:
        latency: Seconds per message in addition to its bytes (α), ≥ 0.
        bandwidth: Bytes per second in each direction (1 / β), > 0.

    Example:
        >>> Link(latency=1e-4, bandwidth=125e6).seconds(125_000)
        0.0011
    """

    latency: float
    bandwidth: float

    def __post_init__(self) -> None:
        if not (self.latency >= 0 and self.bandwidth > 0):
            raise ArgumentError(
                f"latency is {self.latency} s and bandwidth {self.bandwidth} bytes/s: give at "
                "least 0, and more than 0"
            )

    def seconds(self, nbytes: float) -> float:
        """Return the seconds that one message takes."""
        return self.latency + nbytes / self.bandwidth


@dataclass(frozen=True)
class Curve:
    """Piecewise linear function from bytes to seconds through measured points.

    Args:
        points: Pairs of bytes and seconds, at least two, in increasing order.
        beyond: Seconds per byte beyond the last point; None for the slope of the last segment.

    Example:
        >>> points = (0, 1.0), (10, 2.0), (20, 6.0)
        >>> [Curve(points).seconds(15), Curve(points).seconds(30), Curve(points, 0.5).seconds(30)]
        [4.0, 10.0, 11.0]
    """

    points: tuple[tuple[float, float], ...]
    beyond: float | None = None

    def __post_init__(self) -> None:
        sizes = [nbytes for nbytes, _ in self.points]
        if len(sizes) < 2 or any(a >= b for a, b in pairwise(sizes)):
            raise ArgumentError(f"points are of {sizes} bytes: give two sizes or more, in order")

    def seconds(self, nbytes: float) -> float:
        """Interpolate; constant before the first point, extrapolated after the last."""
        first, _ = self.points[0]
        if nbytes <= first:
            return self.points[0][1]
        largest, longest = self.points[-1]
        if nbytes > largest and self.beyond is not None:
            return longest + (nbytes - largest) * self.beyond
        (a, at_a), (b, at_b) = next(
            (line for line in pairwise(self.points) if nbytes <= line[1][0]), self.points[-2:]
        )
        return max(0.0, at_a + (nbytes - a) / (b - a) * (at_b - at_a))


@dataclass(frozen=True)
class Cluster:
    """Ranks and the link that limits their collectives.

    Args:
        ranks: Number of ranks that take part, ≥ 1.
        link: Link of each host. A ring crosses it once in each direction, even if several ranks of
            the host take part.
        measured: Measured seconds by a rank's input bytes, for each collective; collectives that
            are not listed are predicted from the link.
        taken: Seconds by which a collective slows down a backward that runs at the same time
            (copies, shared cores), for each collective; 0 for those that are not listed.
        spare: Fraction of a second thread's computing that costs backward nothing: 0 if both need
            the same core, up to 1.
        burst: Burst credit of the link; None for none. `measured` holds times with full credit.
    """

    ranks: int
    link: Link
    measured: Mapping[str, Curve] = field(default_factory=dict)
    taken: Mapping[str, Curve] = field(default_factory=dict)
    spare: float = 1.0
    burst: Burst | None = None

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise ArgumentError(f"ranks is {self.ranks}: give at least 1")
        if not 0 <= self.spare <= 1:
            raise ArgumentError(f"spare is {self.spare}: give a part, from 0 to 1")


def fit_link(ranks: int, samples: Sequence[tuple[int, float]]) -> Link:
    """Fit a link to the measured times of ring all_reduces.

    Args:
        ranks: Number of ranks that took part, ≥ 2.
        samples: Pairs of bytes and seconds, of at least two sizes; the line goes through the
            smallest and the largest.

    Returns:
        The link; its latency is at least 0.

    Raises:
        ArgumentError: Fewer than two sizes or ranks are given.

    Example:
        >>> fit_link(2, [(0, 2e-4), (1_000_000, 2e-4 + 8e-3)]).bandwidth
        125000000.0
    """
    small, large = min(samples), max(samples)
    if small[0] == large[0] or ranks < 2:
        raise ArgumentError(f"samples are {samples} of {ranks} ranks: give two sizes and two ranks")
    travelled = 2 * (ranks - 1) / ranks * (large[0] - small[0])
    # a large message that took no longer than a small one: as fast as the clock can tell
    seconds = max(large[1] - small[1], 1e-9)
    bandwidth = travelled / seconds
    own = 2 * (ranks - 1) / ranks * small[0] / bandwidth
    return Link(max(0.0, small[1] - own) / (2 * (ranks - 1)), bandwidth)


CLEAR = 0.75
"""Ratio of the first message's time to the last ones' below which a burst is assumed."""


@dataclass(frozen=True)
class Burst:
    """Burst credit of a link after an idle time, and the link's cost without credit.

    Args:
        credit: Credit after a long idle time, in seconds of sending, ≥ 0.
        busy: Seconds per byte of a rank's input tensor without credit, by collective. Collectives
            that are not listed use no credit.
    """

    credit: float
    busy: Mapping[str, float]

    def __post_init__(self) -> None:
        if self.credit < 0 or any(seconds < 0 for seconds in self.busy.values()):
            raise ArgumentError(f"{self} has negative times: give at least 0")

    def missing(self, seconds: float, busy: float, credit: float) -> float:
        """Return the seconds that a message takes in addition to its time after an idle time.

        Args:
            seconds: Time of the message after an idle time.
            busy: Time of the message without credit.
            credit: Remaining credit in seconds.
        """
        return min(max(0.0, busy - seconds - credit), self.credit - credit)


def find_burst(times: Sequence[float]) -> tuple[float, float]:
    """Estimate a link's burst credit from the times of equal messages after an idle time.

    Args:
        times: Seconds of each message, in order, at least two.

    Returns:
        Seconds of a message without credit, and the credit in seconds; the credit is 0 if the first
        message was not clearly faster.

    Raises:
        ArgumentError: Fewer than two times are given.

    Example:
        >>> find_burst([0.25, 1.0, 1.0, 1.0])
        (1.0, 0.75)
        >>> find_burst([0.9, 1.0, 1.1, 1.0])[1]
        0.0
    """
    if len(times) < 2:
        raise ArgumentError(f"times has {len(times)} entries: pass at least two")
    last = times[(len(times) + 1) // 2 :]
    each = median(last)
    if times[0] > CLEAR * min(last):
        return each, 0.0
    return each, max(0.0, each * len(times) - sum(times))


def collective_seconds(message: Message, cluster: Cluster) -> float:
    """Return the seconds of a collective, measured or predicted for a ring or pairwise exchange.

    Example:
        >>> from gradwire.tuning.cost_model import Link
        >>> cluster = Cluster(4, Link(latency=0.0, bandwidth=1e6))
        >>> collective_seconds(Message("all_reduce", 1e6), cluster)  # 2 (W - 1) / W of its bytes
        1.5
    """
    ranks, link = cluster.ranks, cluster.link
    if ranks == 1:
        return 0.0
    if message.collective in cluster.measured:
        return cluster.measured[message.collective].seconds(message.nbytes)
    share = message.nbytes / ranks
    steps, each = {
        "all_reduce": (2 * (ranks - 1), share),
        "all_gather": (ranks - 1, message.nbytes),
        "all_to_all": (ranks - 1, share),
    }[message.collective]
    return steps * link.seconds(each)
