"""Features of PyTorch by which gradients bypass the reducer.

Contexts of `torch.distributed.autograd` keep gradients out of `.grad`, which is an error.
`torch.distributed.optim._apply_optimizer_in_backward` registers hooks that step a parameter's
optimizer when its local gradient is ready. That is too early here: the hooks are removed, and the
reducer steps once the gradient is reduced.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch.nn import Parameter

from gradwire.ddp.hook_handles import remove_hooks
from gradwire.errors import NotSupportedError


def rpc_context_error() -> NotSupportedError | None:
    """Return the error to raise in a context of torch.distributed.autograd; None outside of one.

    A backward of such a context runs in threads without the context. There it is recognized by a
    running backward of torch.distributed.autograd in this process.

    Takes about 0.3 µs if RPC is not used.
    """
    rpc = getattr(torch._C, "_distributed_rpc", None)  # not in builds without RPC
    if rpc is None or not rpc._is_current_rpc_agent_set():
        return None
    try:
        dist.autograd._current_context()
    except RuntimeError:  # not in a context
        if not int(dist.autograd._get_debug_info()["num_current_backward_passes"]):
            return None
    return NotSupportedError(
        "a forward or backward inside of torch.distributed.autograd.context(): gradients stay "
        "in the context instead of .grad, where DistributedDataParallel reduces them. Call the "
        "module under no_sync() there, and reduce the result of get_gradients(); or use PyTorch's "
        "own DistributedDataParallel for models split by RPC"
    )


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
