"""Optional check for NaN and infinity before tensors are sent, since a reduction spreads them.

GRADWIRE_CHECK_FINITE=1 turns it on. It checks the buckets of gradwire's DistributedDataParallel,
and all inputs of collectives on shm. It reads every element, and waits for the device.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gradwire.recorder.lines import call_stack, is_users, read_stack

VARIABLE = "GRADWIRE_CHECK_FINITE"
_MOST = 8
on = os.environ.get(VARIABLE, "0") not in ("", "0")
found: list[dict[str, Any]] = []
"""First tensors with NaN or infinity that this rank was about to send."""


def check_gradients(step: int, names: Sequence[str], parameters: Sequence[Tensor]) -> None:
    """Note parameters whose gradients are not finite.

    Args:
        step: Number of the backward pass.
        names: Names of the parameters.
        parameters: Parameters with their gradients.
    """
    if len(found) < _MOST:
        pairs = zip(names, parameters, strict=True)
        bad = [name for name, p in pairs if p.grad is not None and not _finite([p.grad])]
        if bad:
            _note("the gradients", step, bad)


def check_inputs(op: str, tensors: Sequence[Tensor]) -> None:
    """Note a collective whose inputs are not finite."""
    if len(found) < _MOST and not _finite(tensors):
        _note(f"the input of {op}", None, [])


def _finite(tensors: Sequence[Tensor]) -> bool:
    for tensor in tensors:
        values = tensor.detach()
        values = values.coalesce().values() if values.is_sparse else values
        numbers = values.is_floating_point() or values.is_complex()
        if numbers and not bool(torch.isfinite(values).all()):
            return False
    return True


def _note(what: str, step: int | None, parameters: list[str]) -> None:
    locations = [at for at in call_stack(sys._getframe(1)) if is_users(at[0].co_filename)]
    lines = read_stack(locations)[:4]  # none in autograd's threads
    found.append(
        {"what": what, "step": step, "parameters": parameters, "time": time.time_ns()}
        | {"lines": lines}
    )
