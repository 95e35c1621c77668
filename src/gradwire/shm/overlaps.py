"""Whether what an operation writes lies over what it, or another rank, still reads."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor

__all__ = ["overwrites", "share_memory"]


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
