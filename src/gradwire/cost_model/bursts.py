"""A link that is faster after a rest: buffers of switches, limits by tokens, credits in clouds.

While it rests it saves up sending time, a second each second, up to a limit. What is sent then goes
as fast as without the link's rate, until that is used up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from gradwire.errors import ArgumentError

__all__ = ["Burst", "find_burst"]

CLEAR = 0.75
"""The first message took less than this part of each of the last: due to a rest, not by chance."""


@dataclass(frozen=True)
class Burst:
    """What a link has saved up after a rest, and what it takes when it has not.

    Args:
        credit: Seconds of its sending, ≥ 0.
        busy: Seconds that a byte takes a link that has no credit, by collective: of the tensor that
            a rank gives. Those that are not here take none of it.
    """

    credit: float
    busy: Mapping[str, float]

    def __post_init__(self) -> None:
        if self.credit < 0 or any(seconds < 0 for seconds in self.busy.values()):
            raise ArgumentError(f"{self} has negative times: give at least 0")

    def missing(self, seconds: float, busy: float, credit: float) -> float:
        """How much longer a message takes than after a rest.

        Args:
            seconds: What it takes after a rest.
            busy: What it takes without credit.
            credit: What there is.
        """
        return min(max(0.0, busy - seconds - credit), self.credit - credit)


def find_burst(times: Sequence[float]) -> tuple[float, float]:
    """From how long equal messages took, one after another, the first after a rest.

    Args:
        times: Seconds of each, at least two.

    Returns:
        Seconds of such a message in the end, and by how much all were faster than so many of that:
        the credit; 0 where the first was not clearly faster.

    Raises:
        ArgumentError: There are not two.

    Example:
        >>> find_burst([0.25, 1.0, 1.0, 1.0])
        (1.0, 0.75)
        >>> find_burst([0.9, 1.0, 1.1, 1.0])[1]
        0.0
    """
    if len(times) < 2:
        raise ArgumentError(f"times are of {len(times)} messages: give at least two")
    last = times[(len(times) + 1) // 2 :]
    each = median(last)
    if times[0] > CLEAR * min(last):
        return each, 0.0
    return each, max(0.0, each * len(times) - sum(times))
