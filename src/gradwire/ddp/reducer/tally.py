"""Numbers that the ranks of a group add up once in each backward."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Tally(NamedTuple):
    """One rank's numbers, or their sums over the ranks.

    They travel behind the gradients of a float32 or float64 bucket, in its dtype, or in a message
    of their own, in float64. Never in the default dtype: in bfloat16 300 ranks count as 296 or 304,
    and in float16 a weight of 70,000 is infinite. Integers have to stay below 2**24 when they are
    added over the ranks, which is where float32 begins to round them. A rank that takes part in a
    backward with zeros adds zeros.

    Attributes:
        weight: Weight of the gradients that have accumulated.
        weighted: 1 on a rank that gave a weight.
        unweighted: 1 on a rank that takes part and gave none.
        skipped: Training forwards that no backward has reached, by `Forwards`.
        skipped_squared: The square of that number.
        begun: All training forwards.
        begun_squared: The square of that number.
    """

    weight: float = 0.0
    weighted: float = 0.0
    unweighted: float = 0.0
    skipped: float = 0.0
    skipped_squared: float = 0.0
    begun: float = 0.0
    begun_squared: float = 0.0

    @property
    def in_step(self) -> bool:
        """True if ranks that take part have skipped, or begun, the same number of forwards."""
        ranks = self.weighted + self.unweighted
        return (
            ranks * self.skipped_squared == self.skipped**2
            or ranks * self.begun_squared == self.begun**2
        )

    def message(self, *before: float) -> Tensor:
        """Return the numbers as a message of their own, after some others."""
        return torch.tensor([*before, *self], dtype=torch.float64)

    def write(self, flat: Tensor) -> None:
        """Put the numbers into the last elements of a bucket."""
        flat[-len(self) :] = torch.tensor(self, dtype=flat.dtype)

    @classmethod
    def read(cls, flat: Tensor) -> Tally:
        """Return the numbers in the last elements of a bucket or a message."""
        return cls(*flat[-len(cls._fields) :].tolist())
