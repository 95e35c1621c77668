"""Numbers that the ranks of a group sum once per backward."""

from __future__ import annotations

from array import array
from typing import NamedTuple

import torch
from torch import Tensor


class Tally(NamedTuple):
    """One rank's numbers, or their sums over the ranks.

    They are sent after the gradients of a float32 or float64 bucket, in its dtype, or in a separate
    message, in float64. The default dtype is not used: in bfloat16, 300 ranks count as 296 or 304,
    and in float16 a weight of 70,000 is infinite. Sums of integers over the ranks must stay below
    2**24, from where float32 rounds them. A rank that takes part in a backward with zero gradients
    adds zeros.

    Attributes:
        weight: Weight of the accumulated gradients.
        weighted: 1 on a rank that gave a weight.
        unweighted: 1 on a rank that takes part and gave none.
        skipped: Training forwards that no backward has reached, see `Forwards`.
        skipped_squared: Square of `skipped`.
        begun: All training forwards.
        begun_squared: Square of `begun`.
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
        """True if all ranks that take part have skipped, or begun, the same number of forwards."""
        ranks = self.weighted + self.unweighted
        return (
            ranks * self.skipped_squared == self.skipped**2
            or ranks * self.begun_squared == self.begun**2
        )

    def message(self, *before: float) -> Tensor:
        """Return the numbers as a separate message, after the given ones."""
        return torch.tensor([*before, *self], dtype=torch.float64)

    def write(self, extra: Tensor) -> None:
        """Write the numbers to the extra elements of a bucket."""
        kind = "f" if extra.dtype is torch.float32 else "d"
        # 0.8 µs; torch.tensor takes 2.2
        extra.copy_(torch.frombuffer(array(kind, self), dtype=extra.dtype))

    @classmethod
    def read(cls, sums: Tensor) -> Tally:
        """Return the numbers in a bucket's extra elements, or in a message's last ones."""
        return cls(*sums.tolist()[-len(cls._fields) :])
