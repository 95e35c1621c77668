"""Copies between ranks' memory, and checks whether tensors overlap."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from itertools import pairwise

from torch import Tensor
from torch.autograd.graph import increment_version

_MOVED_BYTES = 32 << 10
"""From here on the C library copies: of pieces that lie in the last cache it copies 10 GB/s where
torch copies 6, as it does not read what it overwrites; torch's `copy_` is as fast on others."""


def copy(target: Tensor, source: Tensor) -> None:
    """Copy values, unless both are the same memory; they may lie over each other.

    Args:
        target: 1-d and contiguous.
        source: Of its size and dtype, 1-d and contiguous.
    """
    to, start, nbytes = target.data_ptr(), source.data_ptr(), target.nbytes
    assert source.nbytes == nbytes
    if to == start:
        return
    # `copy_` raises where the two overlap. 0: zeros without memory
    if (nbytes < _MOVED_BYTES and abs(to - start) >= nbytes) or not (to and start):
        target.copy_(source)
        return
    ctypes.memmove(to, start, nbytes)
    count_write(target)


def copy_to_all(source: Tensor, targets: Sequence[Tensor]) -> Callable[[int, int], None]:
    """A function that copies some of the source's bytes to the same place in each target.

    Its arguments are the first byte and how many. A piece takes 0.5 µs so, and 2 with `copy`.

    Args:
        source: 1-d and contiguous, with memory of its own.
        targets: Of its size and dtype, 1-d and contiguous, in other memory.
    """
    origin, addresses = source.data_ptr(), [target.data_ptr() for target in targets]
    for target in targets:
        count_write(target)

    def copy_piece(start: int, nbytes: int) -> None:
        for address in addresses:
            ctypes.memmove(address + start, origin + start, nbytes)

    return copy_piece


def count_write(target: Tensor) -> None:
    """Tell autograd that a tensor was written to, as `copy_` does: backward refuses to use it."""
    if not target.is_inference():
        increment_version(target)


def overwrites(
    blocks: Sequence[Tensor], results: Sequence[Tensor | None], rank: int, own: Tensor | None
) -> bool:
    """Whether writing the results would overwrite blocks that other ranks have yet to read.

    Args:
        blocks: The blocks that others read, 1-d and contiguous.
        results: The tensors that are written, 1-d and contiguous, by rank.
        rank: This rank.
        own: This rank's block for itself, which no other reads: its result may be the same memory.
    """
    reads = [_span(block) for block in blocks]
    writes = [
        _span(result)
        for source, result in enumerate(results)
        if result is not None
        and (source != rank or own is None or result.data_ptr() != own.data_ptr())
    ]
    if not reads or not writes:
        return False
    (start, stop), (first, last) = _hull(reads), _hull(writes)
    if stop <= first or last <= start:
        return False  # the usual case, without comparing every pair
    return any(a < d and c < b for a, b in reads for c, d in writes)


def share_memory(tensors: Sequence[Tensor]) -> bool:
    """Whether some of the tensors lie over each other, as their first and last elements tell."""
    if len(tensors) < 2:
        return False
    spans = sorted(map(_hull_of, tensors))
    return any(start < stop for (_, stop), (start, _) in pairwise(spans))


def _hull_of(tensor: Tensor) -> tuple[int, int]:
    if tensor.is_contiguous():
        return _span(tensor)
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last, start = sum((length - 1) * stride for length, stride in steps), tensor.data_ptr()
    return start, start + (last + 1) * tensor.itemsize


def _span(flat: Tensor) -> tuple[int, int]:
    start = flat.data_ptr()
    return start, start + flat.nbytes


def _hull(spans: Sequence[tuple[int, int]]) -> tuple[int, int]:
    return min(start for start, _ in spans), max(stop for _, stop in spans)
