"""Fresh memory for large results, in huge pages where Linux gives them on request.

The first write to a fresh page costs a fault. At 4 KiB a page the faults take longer than the
copy itself for results that malloc maps anew each time (32 MiB and more with glibc).
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable

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
    """Return a tensor whose memory is fresh and not yet written to."""
    size = tensor.numel() * tensor.element_size()
    if size >= _LARGE and tensor.device.type == "cpu" and (madvise := _madvise()):
        start = -(-tensor.data_ptr() // _PAGE) * _PAGE
        end = (tensor.data_ptr() + size) // _PAGE * _PAGE
        # A kernel without huge pages refuses the advice: the memory is as good as before.
        madvise(start, end - start, _MADV_HUGEPAGE)
    return tensor
