"""Shards of a step's batch and their samples, which follow from the step's number alone."""

from __future__ import annotations

import hashlib
import itertools
import math
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import mul

import torch

from gradwire.errors import ArgumentError, ArgumentTypeError


@dataclass(frozen=True)
class Shard:
    """Contiguous shards of one step, run as one; a single shard if sums are reproducible.

    Args:
        first: Number of the first shard.
        stop: Number after the last shard.
    """

    first: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.first


def check_shards(shards: object) -> int:
    """Return the number of shards; raise unless it is an int and a power of two."""
    if isinstance(shards, bool) or not isinstance(shards, int):
        raise ArgumentTypeError(f"shards is {shards!r}: pass an int, a power of two such as 8")
    if shards < 1 or shards & (shards - 1):
        raise ArgumentError(f"shards is {shards}: pass a power of two, such as 8")
    return shards


def deal(shards: int, members: int) -> list[range]:
    """Return contiguous ranges of shards for the members, of nearly equal length."""
    # members beyond the number of shards get empty ranges, but take part in sums
    length, longer = divmod(shards, members)
    starts = [rank * length + min(rank, longer) for rank in range(members + 1)]
    return [range(start, stop) for start, stop in itertools.pairwise(starts)]


def assign(shards: int, held: Sequence[Collection[int]]) -> list[list[int]]:
    """Return the shards of each member, if some members hold results of shards of this step."""
    # assign(8, [[0, 1], [], [5]]) returns [[0, 1, 2, 3], [4, 6], [5, 7]]
    taken: set[int] = set()
    assigned: list[list[int]] = []
    for own in held:  # the first member that holds a result uses it
        assigned.append([shard for shard in own if shard not in taken])
        taken.update(own)
    missing = [shard for shard in range(shards) if shard not in taken]
    for own, run in zip(assigned, deal(len(missing), len(held)), strict=True):
        own.extend(missing[index] for index in run)
        own.sort()
    return assigned


class Samples:
    """Assigns the samples of a map-style dataset to the shards of each step.

    Steps take `batch` samples each from an endless sequence of passes over the dataset, each pass
    in another order. So every sample occurs equally often.

    Args:
        size: Number of samples in the dataset.
        batch: Number of samples in a step, over all shards.
        shards: Number of shards.
        seed: Seed of the orders, the same on every member.
        shuffle: True for another order in each pass; False for the dataset's order.

    Raises:
        ArgumentError: A number is not positive, or a step has fewer samples than shards.

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
        """Return the indices into the dataset of a shard of a step."""
        first = step * self.batch
        begin, end = self._runs[shard.first].start, self._runs[shard.stop - 1].stop
        places = (divmod(first + i, self.size) for i in range(begin, end))
        return [self._order(time)[index] for time, index in places]

    def count(self, shard: Shard) -> int:
        """Return the number of samples in a shard, the same in every step."""
        return self._runs[shard.stop - 1].stop - self._runs[shard.first].start

    def _make_order(self, time: int) -> list[int]:
        if not self._shuffle:
            return list(range(self.size))
        generator = torch.Generator().manual_seed(seed_of(self._seed, time, 0, "order"))
        order: list[int] = torch.randperm(self.size, generator=generator).tolist()
        return order


def seed_of(seed: int, step: int, first: int, use: str = "") -> int:
    """Return a seed for torch, of 64 bits; `use` is the purpose of the random numbers."""
    # a digest, because torch's generator and NumPy's take the low 32 bits only
    text = f"{seed} {step} {first} {use}".rstrip()
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


BALANCE_SECONDS = 1.0
"""Time of the slowest member in shards between two decisions."""
clock = time.perf_counter


class Speeds:
    """Time of each member for a shard, over the steps of a generation."""

    def __init__(self, members: int) -> None:
        self._seconds = [math.nan] * members
        self._slowest = 0.0
        self._began = 0.0
        self._own: list[float] = []

    def begin(self) -> None:
        """Note that this member begins a shard."""
        self._began = clock()

    def end(self) -> None:
        """Note that this member has completed the shard."""
        self._own.append(clock() - self._began)

    def take(self) -> float:
        """Return this member's mean time for a shard of this step; NaN if it computed none."""
        own, self._own = self._own, []
        return sum(own) / len(own) if own else math.nan

    def note(self, seconds: Sequence[float], counts: Sequence[int]) -> None:
        """Take in each member's time for a shard in a step, and number of shards."""
        # all members note the same values, so that they decide alike
        for member, now in enumerate(seconds):
            if not math.isnan(now):
                before = self._seconds[member]
                self._seconds[member] = now if math.isnan(before) else (before + now) / 2
        times = [c * s for c, s in zip(counts, seconds, strict=True) if s > 0]
        self._slowest += max(times, default=0.0)

    def decide(self, counts: Sequence[int]) -> list[int] | None:
        """Return other numbers of shards if they make steps shorter, else None."""
        if self._slowest < BALANCE_SECONDS:
            return None
        self._slowest = 0.0
        found = balance(counts, self._seconds)
        return None if found == list(counts) else found


def balance(counts: Sequence[int], seconds: Sequence[float]) -> list[int]:
    """Return the number of shards of each member that makes the slowest member fastest."""
    # balance([4, 4], [1.0, 3.0]) returns [6, 2];
    # with fewer shards than members, or a time that is not known (NaN), nothing changes
    if 0 in counts or not all(second > 0 for second in seconds):
        return list(counts)
    # at least one shard each, so that the member's speed is known
    found = [1] * len(counts)
    for _ in range(sum(counts) - len(counts)):
        found[min(range(len(found)), key=lambda m: ((found[m] + 1) * seconds[m], m))] += 1
    before, after = (max(map(mul, c, seconds)) for c in (counts, found))
    # less than 10 % is not worth a change
    return found if after < 0.9 * before else list(counts)
