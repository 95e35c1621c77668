"""Shards of a step's batch and their samples, which follow from the step's number alone."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import lru_cache

import torch

from gradwire.errors import ArgumentError, ArgumentTypeError


@dataclass(frozen=True)
class Shard:
    """Neighbouring shards of one step, run as one: a single one where sums are reproducible.

    Args:
        first: The number of the first one.
        stop: The number after the last.
    """

    first: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.first


def check_shards(shards: object) -> int:
    """The number of shards.

    Raises:
        ArgumentTypeError: Not an int.
        ArgumentError: Not a power of two.
    """
    if isinstance(shards, bool) or not isinstance(shards, int):
        raise ArgumentTypeError(f"shards is {shards!r}: pass an int, a power of two such as 8")
    if shards < 1 or shards & (shards - 1):
        raise ArgumentError(f"shards is {shards}: pass a power of two, such as 8")
    return shards


def deal(shards: int, members: int) -> list[range]:
    """Contiguous runs of shards for each member, of lengths that differ by one at most.

    Members beyond the number of shards get none, but take part in sums.

    Example:
        >>> deal(8, 3)
        [range(0, 3), range(3, 6), range(6, 8)]
        >>> deal(8, 4)
        [range(0, 2), range(2, 4), range(4, 6), range(6, 8)]
    """
    length, longer = divmod(shards, members)
    starts = [rank * length + min(rank, longer) for rank in range(members + 1)]
    return [range(start, stop) for start, stop in itertools.pairwise(starts)]


class Samples:
    """Deals the samples of a map-style dataset.

    The dataset is gone through again and again, each time in another order, and steps take
    `batch` samples each from that endless sequence: every sample comes equally often.

    Args:
        size: How many samples there are.
        batch: How many a step has, in all.
        shards: Into how many shards they are cut.
        seed: Of the orders; the same on every member.
        shuffle: Whether there is another order each time; otherwise it is the dataset's.

    Raises:
        ArgumentError: A number is not positive, or there are fewer samples in a step than shards.

    Example:
        >>> samples = Samples(6, batch=4, shards=2, shuffle=False)
        >>> [samples.ids(step, Shard(0, 2)) for step in range(3)]
        [[0, 1, 2, 3], [4, 5, 0, 1], [2, 3, 4, 5]]
        >>> samples.ids(1, Shard(1, 2))
        [0, 1]
    """

    def __init__(
        self, size: int, *, batch: int, shards: int, seed: int = 0, shuffle: bool = True
    ) -> None:
        for name, value in (("size", size), ("batch", batch), ("shards", shards)):
            if value < 1:
                raise ArgumentError(f"{name} is {value}: pass a number above 0")
        if batch < shards:
            raise ArgumentError(f"batch is {batch}, with {shards} shards: pass at least {shards}")
        self.size, self.batch, self.shards = size, batch, shards
        self._seed, self._shuffle = seed, shuffle
        self._runs = deal(batch, shards)
        self._order = lru_cache(maxsize=2)(self._make_order)

    def ids(self, step: int, shard: Shard) -> list[int]:
        """The indices into the dataset of a shard of a step."""
        first = step * self.batch
        begin, end = self._runs[shard.first].start, self._runs[shard.stop - 1].stop
        return [self._at(first + i) for i in range(begin, end)]

    def count(self, shard: Shard) -> int:
        """How many samples a shard has, in every step."""
        return self._runs[shard.stop - 1].stop - self._runs[shard.first].start

    def _at(self, position: int) -> int:
        time, index = divmod(position, self.size)
        return self._order(time)[index]

    def _make_order(self, time: int) -> list[int]:
        if not self._shuffle:
            return list(range(self.size))
        generator = torch.Generator().manual_seed(((self._seed << 32) + time) % 2**64)
        order: list[int] = torch.randperm(self.size, generator=generator).tolist()
        return order
