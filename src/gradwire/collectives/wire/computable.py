"""Which dtypes PyTorch can compute with: found by trying, because it has no table of them.

Every dtype can be sent, but some, such as uint16 and float8, can be neither summed nor compared. A
rank that finds this out after data was sent leaves the others waiting for what it would send next.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._python_dispatch import _disable_current_modes

from gradwire.collectives.wire.backends import CARRIED
from gradwire.errors import ArgumentError

__all__ = ["Reduction", "check_computable"]

Reduction = Callable[[Tensor, str], Any]

_COMPUTABLE = CARRIED | {torch.int16, torch.bool, torch.complex64, torch.complex128}
"""Whatever a reduction is defined for, PyTorch computes for these."""


def check_computable(x: Tensor, op: str, reduction: Reduction) -> None:
    """Raise if PyTorch has no such reduction of the tensor's dtype.

    Args:
        x: The tensor.
        op: The name of the operation.
        reduction: From all ranks' pieces, stacked, and the name to the reduced ones.

    Raises:
        ArgumentError: It has none.
    """
    if x.dtype in _COMPUTABLE or _computes(reduction, op, x.dtype, x.device):
        return
    wider = torch.float32 if x.is_floating_point() else torch.int64
    wider = torch.complex64 if x.is_complex() else wider
    raise ArgumentError(
        f"op is {op}, tensor is {x.dtype}: PyTorch cannot compute it on {x.device.type}; convert "
        f"the tensor, for instance to {wider}"
    )


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _computes(reduction: Reduction, op: str, dtype: torch.dtype, device: torch.device) -> bool:
    return _try(reduction, op, dtype, device)


@lru_cache(maxsize=256)
def _try(reduction: Reduction, op: str, dtype: torch.dtype, device: torch.device) -> bool:
    # Neither torch.func's transforms nor modes, such as that of fake tensors, may see the trial.
    with temporarily_clear_interpreter_stack(), _disable_current_modes():
        try:
            # of one element, because float8 can be multiplied only from two on
            reduction(torch.zeros((2, 1), dtype=dtype, device=device), op)
        except (RuntimeError, TypeError):
            return False
    return True
