"""Links as two numbers: cost per message and cost per byte (the α-β model).

Source:
    R. W. Hockney, The communication challenge for MPP, 1994.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from gradwire.cost_model.bursts import Burst
from gradwire.errors import ArgumentError

__all__ = ["Cluster", "Curve", "Link", "fit_link"]


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
