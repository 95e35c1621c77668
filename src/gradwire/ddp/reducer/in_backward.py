"""Optimizers that step during backward, each parameter's as soon as its gradient is reduced.

`torch.distributed.optim._apply_optimizer_in_backward` has them step when the local gradient is
ready, which is too early here: its hooks are taken away, and the reducer steps instead.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

import torch
from torch.nn import Parameter

__all__ = ["step_and_clear", "take_over"]

MODULE = "torch.distributed.optim.apply_optimizer_in_backward"


def take_over(parameters: Iterable[Parameter]) -> list[Parameter]:
    """The parameters that have optimizers of their own, which now no longer step by themselves."""
    if MODULE not in sys.modules:
        return []
    found = [p for p in parameters if hasattr(p, "_in_backward_optimizers")]
    handles = sys.modules[MODULE].param_to_optim_hook_handle_map
    for parameter in found:
        for handle in handles.get(parameter, ()):
            handle.remove()
    return found


def step_and_clear(parameters: Sequence[Parameter]) -> None:
    """Step with reduced gradients, which are then let go."""
    for parameter in parameters:
        if parameter.grad is not None:
            with torch.enable_grad():
                for optimizer in parameter._in_backward_optimizers:  # type: ignore[attr-defined]
                    optimizer.step()
            parameter.grad = None
