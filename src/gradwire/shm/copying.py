"""Copies between ranks' memory, which are what most operations on shared memory consist of."""

from __future__ import annotations

import ctypes

from torch import Tensor
from torch.autograd.graph import increment_version

__all__ = ["copy"]

_MOVED_BYTES = 32 << 10
"""From here on the C library copies: of pieces that lie in the last cache it copies 10 GB/s where
torch copies 6, as it does not read what it overwrites; torch's `copy_` is as fast on others."""


def copy(target: Tensor, source: Tensor) -> None:
    """Copy values, unless both are the same memory.

    Args:
        target: 1-d and contiguous.
        source: Of its size and dtype, 1-d and contiguous.
    """
    to, start = target.data_ptr(), source.data_ptr()
    assert source.nbytes == target.nbytes
    if to == start:
        return
    if target.nbytes < _MOVED_BYTES or not (to and start):  # 0: zeros without memory
        target.copy_(source)
        return
    ctypes.memmove(to, start, target.nbytes)
    if not target.is_inference():
        increment_version(target)  # as `copy_` does: backward refuses what was overwritten
