"""Fresh memory for large results, in huge pages where Linux gives them on request.

The first write to a fresh page costs a fault. At 4 KiB a page the faults take longer than the
copy itself for results that malloc maps anew each time (32 MiB and more with glibc).
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable

import torch
from torch import Tensor

_LARGE = 32 << 20
_PAGE = 2 << 20
_MADV_HUGEPAGE = 14


@functools.cache
def _madvise() -> Callable[[int, int, int], int] | None:
    if not sys.platform.startswith("linux"):
        return None
    call = ctypes.CDLL(None).madvise
    call.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return call


def advised(tensor: Tensor) -> Tensor:
    """The tensor, whose memory is fresh and not yet written to."""
    size = tensor.numel() * tensor.element_size()
    if size >= _LARGE and tensor.device.type == "cpu" and (madvise := _madvise()):
        start = -(-tensor.data_ptr() // _PAGE) * _PAGE
        end = (tensor.data_ptr() + size) // _PAGE * _PAGE
        # A kernel without huge pages refuses the advice: the memory is as good as before.
        madvise(start, end - start, _MADV_HUGEPAGE)
    return tensor


def empty(
    shape: tuple[int, ...] | torch.Size,
    like: Tensor,
    device: torch.device,
    *,
    memory_format: torch.memory_format = torch.contiguous_format,
    pinned: bool = False,
) -> Tensor:
    """Uninitialised memory of the dtype of `like`."""
    result = torch.empty(
        shape, dtype=like.dtype, device=device, memory_format=memory_format, pin_memory=pinned
    )
    return result if pinned else advised(result)


def empty_like(tensor: Tensor, device: torch.device, *, pinned: bool = False) -> Tensor:
    """Uninitialised memory of a tensor's shape, dtype and, where it has no gaps, strides."""
    result = torch.empty_like(tensor, device=device, pin_memory=pinned)
    return result if pinned else advised(result)
