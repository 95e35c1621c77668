"""Assigns parts of parameters to the ranks that step them: integers in, integers out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ALIGNED_ELEMENTS = 64
"""Parameters and cuts begin at multiples of this, so that vectorized steps give the same bits."""


@dataclass(frozen=True)
class Piece:
    """Elements `start` to `stop` of a parameter, in its memory order, stepped by one rank."""

    # index of the parameter in its bucket
    parameter: int
    start: int
    stop: int
    # of the first element in the rank's shard of the bucket
    position: int


@dataclass(frozen=True)
class Assignment:
    """Pieces of a bucket for each rank, and the number of elements of each rank's shard."""

    pieces: Sequence[Sequence[Piece]]
    lengths: Sequence[int]


def _aligned(elements: int) -> int:
    return -(-elements // ALIGNED_ELEMENTS) * ALIGNED_ELEMENTS


def cut(sizes: Sequence[int], ranks: int) -> Assignment:
    """Cut a bucket of parameters into shards of equal length, one for each rank."""
    pieces: list[list[Piece]] = [[] for _ in range(ranks)]
    length = _aligned(-(-sum(map(_aligned, sizes)) // ranks))
    first = 0
    for parameter, size in enumerate(sizes):
        start = 0
        while start < size:
            rank, position = divmod(first + start, length)
            stop = min(size, start + length - position)
            pieces[rank].append(Piece(parameter, start, stop, position))
            start = stop
        first += _aligned(size)
    return Assignment(pieces, [length] * ranks)


def distribute(sizes: Sequence[int], costs: Sequence[int], loads: list[int]) -> Assignment:
    """Give each parameter to the rank with the least cost so far; add its cost to `loads`."""
    pieces: list[list[Piece]] = [[] for _ in loads]
    lengths = [0] * len(loads)
    for parameter in sorted(range(len(sizes)), key=lambda i: -costs[i]):
        rank = min(range(len(loads)), key=lambda r: (loads[r], lengths[r]))
        pieces[rank].append(Piece(parameter, 0, sizes[parameter], lengths[rank]))
        loads[rank] += costs[parameter]
        lengths[rank] += _aligned(sizes[parameter])
    return Assignment(pieces, lengths)
