"""broadcast_coalesced: copy a list of tensors from one rank to all others as a stream of pieces.

A piece fills a slot, whether it is part of a large tensor or a hundred small ones. For ResNet-50's
320 tensors this takes a quarter of the time of one broadcast per large tensor and one for the rest,
packed.
"""

from __future__ import annotations

import zlib
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from gradwire.shm.algorithms.group_state import GroupState
from gradwire.shm.memory.header import NUMBERS, Call

_PIECES = 4
"""Minimum number of pieces of a stream, so that copies in and out overlap."""
_PIECE_BYTES = 128 << 10
"""Minimum size of pieces: for shorter ones, the waits would cost more than the overlap gains."""


def broadcast(state: GroupState, flats: Sequence[Tensor], root: int) -> None:
    """Copy the root's values to all ranks' tensors.

    Args:
        state: State of the group on this rank.
        flats: 1-d contiguous tensors of any dtypes, with equal sizes and dtypes on all ranks.
        root: Rank of the root in the group.
    """
    runs = _runs(flats)
    total = sum(sum(run.sizes) * run.dtype.itemsize for run in runs)
    location = state.staged_location(total, sends=state.rank == root)
    call = Call("broadcast_coalesced", numel=total, root=root, checksum=_checksum(flats, runs))
    state.announce(call, location)
    if state.size == 1:
        return
    ring = state.ring
    limit = min(ring.slot_bytes, max(_PIECE_BYTES, total // _PIECES))
    pieces = [piece for run in runs for piece in _pieces(run, limit // run.dtype.itemsize)]
    slots: dict[torch.dtype, list[Tensor]] = {}
    partners = None if state.rank == root else [root]
    for fill, fetch in state.pipeline(len(pieces), stages=2, partners=partners):
        now = fill if state.rank == root else fetch
        if now < 0:
            continue
        own, sizes = pieces[now]
        dtype = own[0].dtype
        if dtype not in slots:
            slots[dtype] = state.slots(root, dtype)
        shared = slots[dtype][now % ring.slots][: sum(sizes)]
        if state.rank == root:
            torch.cat(own, out=shared)
        else:
            torch.split_with_sizes_copy(shared, sizes, out=own)


@dataclass
class _Run:
    """Tensors of one dtype, in order, and their numbers of elements."""

    dtype: torch.dtype
    flats: list[Tensor]
    sizes: list[int]


def _runs(flats: Sequence[Tensor]) -> list[_Run]:
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for flat in flats:
        by_dtype.setdefault(flat.dtype, []).append(flat)
    return [
        _Run(dtype, alike, [flat.numel() for flat in alike]) for dtype, alike in by_dtype.items()
    ]


def _pieces(run: _Run, full: int) -> Iterator[tuple[list[Tensor], list[int]]]:
    """Yield pieces of `full` elements: lists of the run's tensors, the first and last cut."""
    ends = list(accumulate(run.sizes))
    for lo in range(0, ends[-1], full):
        hi = min(lo + full, ends[-1])
        first, last = bisect_right(ends, lo), bisect_left(ends, hi)
        tensors, sizes = run.flats[first : last + 1], run.sizes[first : last + 1]
        if (over := ends[last] - hi) > 0:
            sizes[-1] -= over
            tensors[-1] = tensors[-1][: sizes[-1]]
        if (before := lo - (ends[first] - run.sizes[first])) > 0:
            sizes[0] -= before
            tensors[0] = tensors[0][before:]
        yield tensors, sizes


def _checksum(flats: Sequence[Tensor], runs: Sequence[_Run]) -> int:
    """Return the checksum of all sizes and dtypes; sizes of one dtype are in tensor order."""
    numbers = [n for run in runs for n in (NUMBERS[run.dtype], len(run.sizes), *run.sizes)]
    if len(runs) > 1:
        numbers += [NUMBERS[flat.dtype] for flat in flats]
    return zlib.crc32(array("q", numbers))
