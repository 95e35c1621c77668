"""Refuses contexts of torch.distributed.autograd, whose gradients are not where ours are sought."""

from __future__ import annotations

import torch
import torch.distributed as dist

from gradwire.errors import NotSupportedError


def rpc_context_error() -> NotSupportedError | None:
    """What is to be raised in a context of torch.distributed.autograd; None outside of one.

    A backward of such a context runs in threads that do not have it: there it is recognized by a
    backward of torch.distributed.autograd that this process runs.

    Takes about 0.3 µs where there is no RPC.
    """
    rpc = getattr(torch._C, "_distributed_rpc", None)  # not in builds without RPC
    if rpc is None or not rpc._is_current_rpc_agent_set():
        return None
    try:
        dist.autograd._current_context()
    except RuntimeError:  # there is none
        if not int(dist.autograd._get_debug_info()["num_current_backward_passes"]):
            return None
    return NotSupportedError(
        "a forward or backward inside of torch.distributed.autograd.context(): gradients stay "
        "in the context and not in .grad, where DistributedDataParallel reduces them. Call the "
        "module under no_sync() there, and reduce what get_gradients() gives; or use PyTorch's own "
        "DistributedDataParallel for models that are divided by RPC"
    )
