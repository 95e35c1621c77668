"""Wrappers of the model: gradwire's and torch's data-parallel classes, with the same hook."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as torch_hooks
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from gradwire import hooks
from gradwire.cli.demo.options import DemoOptions
from gradwire.ddp import DistributedDataParallel
from gradwire.devices import DataParallel

BUCKET_CAP_MB = 0.25  # small network: two buckets overlap communication with computation

_StateAndHook = tuple[Any, Callable[..., Any]]


@dataclass(frozen=True)
class Hook:
    """Communication hook of the demo, gradwire's and torch's.

    Args:
        ours: Function that returns state and hook for gradwire's class; None for no hook.
        torch: The same for torch's class.
        lossy: True if gradients are compressed.
        torch_limit: Reason why torch's class cannot run it on CPU tensors; "" if it can.
    """

    ours: Callable[[dist.ProcessGroup], _StateAndHook] | None
    torch: Callable[[dist.ProcessGroup], _StateAndHook] | None
    lossy: bool
    torch_limit: str = ""


def _power_sgd(group: dist.ProcessGroup) -> _StateAndHook:
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power_sgd

    state = power_sgd.PowerSGDState(
        process_group=group, matrix_approximation_rank=4, start_powerSGD_iter=10
    )
    return state, power_sgd.powerSGD_hook


HOOKS: dict[str, Hook] = {
    "none": Hook(None, None, lossy=False),
    "all_reduce": Hook(
        lambda group: (group, hooks.all_reduce),
        lambda group: (group, torch_hooks.allreduce_hook),
        lossy=False,
    ),
    "fp16": Hook(
        lambda group: (group, hooks.fp16),
        lambda group: (group, torch_hooks.fp16_compress_hook),
        lossy=True,
    ),
    "bf16": Hook(
        lambda group: (group, hooks.bf16),
        lambda group: (group, torch_hooks.bf16_compress_hook),
        lossy=True,
        torch_limit="rejects it without NCCL",
    ),
    "powersgd": Hook(
        _power_sgd,
        _power_sgd,
        lossy=True,
        torch_limit="hangs in it on Gloo when there are several buckets",
    ),
}


def wrap_ours(model: nn.Module, options: DemoOptions, group: dist.ProcessGroup | None) -> nn.Module:
    """Wrap a model in gradwire's DistributedDataParallel, or in DataParallel without a group."""
    if group is None:
        return DataParallel(model, ["cpu"] * options.shares)
    wrapped = DistributedDataParallel(model, process_group=group, bucket_cap_mb=BUCKET_CAP_MB)
    hook = HOOKS[options.hook].ours
    if hook is not None:
        wrapped.register_comm_hook(*hook(group))
    return wrapped


def wrap_torch(
    model: nn.Module, options: DemoOptions, group: dist.ProcessGroup | None
) -> nn.Module | None:
    """Wrap a model in torch's DistributedDataParallel; None if it cannot run the hook on the CPU.

    Also None without a group, since torch's DataParallel does not run on the CPU.
    """
    hook = HOOKS[options.hook]
    on_cpu = next(model.parameters()).device.type == "cpu"
    if group is None or (hook.torch_limit and on_cpu):
        return None
    wrapped = TorchDDP(model, process_group=group, bucket_cap_mb=BUCKET_CAP_MB)
    if hook.torch is not None:
        wrapped.register_comm_hook(*hook.torch(group))
    return wrapped
