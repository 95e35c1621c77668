"""Links that are faster after an idle time: switch buffers, token buckets, cloud burst credits.

While such a link is idle, it accumulates a credit of sending time, one second per second, up to a
limit. Until the credit is used up, messages are not slowed down to the link's rate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from gradwire.errors import ArgumentError

__all__ = ["Burst", "find_burst"]

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
