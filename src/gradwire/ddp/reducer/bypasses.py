"""Optimizers in backward, by which gradients bypass the reducer.

`torch.distributed.optim._apply_optimizer_in_backward` registers hooks that step a parameter's
optimizer when its local gradient is ready. That is too early here: the hooks are removed, and the
reducer steps once the gradient is reduced.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

import torch
from torch.nn import Parameter

from gradwire.ddp.hook_handles import remove_hooks

MODULE = "torch.distributed.optim.apply_optimizer_in_backward"


def has_new_hooks() -> bool:
    """Return True if there may be hooks of optimizers in backward that were not removed."""
    module = sys.modules.get(MODULE)
    return module is not None and len(module.param_to_optim_hook_handle_map) > 0


def detach_optimizer_hooks(parameters: Iterable[Parameter]) -> list[Parameter]:
    """Remove the hooks of optimizers in backward, and return their parameters.

    The handles are removed from PyTorch's map, too, so that `has_new_hooks` sees only later hooks.
    """
    if MODULE not in sys.modules:
        return []
    found = [p for p in parameters if hasattr(p, "_in_backward_optimizers")]
    handles = sys.modules[MODULE].param_to_optim_hook_handle_map
    for parameter in found:
        remove_hooks(handles.pop(parameter, ()))
    return found


def step_and_clear(parameters: Sequence[Parameter]) -> None:
    """Step the optimizers with reduced gradients, and free the gradients."""
    for parameter in parameters:
        if parameter.grad is not None:
            with torch.enable_grad():
                for optimizer in parameter._in_backward_optimizers:  # type: ignore[attr-defined]
                    optimizer.step()
            parameter.grad = None
