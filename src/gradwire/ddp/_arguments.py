"""What DistributedDataParallel makes of its arguments, before anything is sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import Parameter
from torch.nn.parameter import UninitializedParameter

from gradwire.errors import ArgumentError, ArgumentTypeError, NotSupportedError

__all__ = ["check_module", "refuse_unsupported", "resolve_caps", "resolve_device"]

INSTEAD = {
    "find_unused_parameters": "make every parameter take part in the loss (for instance "
    "loss + 0 * sum of the others)",
    "static_graph": "leave it out where every parameter gets a gradient once a step",
    "delay_all_reduce_named_params": "let the parameters be reduced in their buckets",
    "param_to_hook_all_reduce": "let the parameters be reduced in their buckets",
    "mixed_precision": "use torch.autocast, or register_comm_hook(None, gradwire.hooks.bf16)",
    "skip_all_reduce_unused_params": "set requires_grad=False on unused parameters",
}


def refuse_unsupported(**asked: Any) -> None:
    """Raise for the first argument that asks for a feature there is not.

    Raises:
        NotSupportedError: Names the argument and what to do instead.
    """
    for name, value in asked.items():
        if value:
            raise NotSupportedError(f"{name}={value!r} is not supported yet: {INSTEAD[name]}")


def check_module(module: object, ignored: set[str]) -> list[tuple[str, Parameter]]:
    """The module's parameters by name, if they can be reduced.

    Raises:
        ArgumentTypeError: Not a module.
        ArgumentError: No parameter requires a gradient, or one has no shape yet.
        NotSupportedError: An embedding makes sparse gradients.
    """
    if not isinstance(module, nn.Module):
        raise ArgumentTypeError(f"module is a {type(module).__name__}: pass a torch.nn.Module")
    named = [(n, p) for n, p in module.named_parameters() if n not in ignored]
    if not any(p.requires_grad for _, p in named):
        raise ArgumentError(
            f"module {type(module).__name__} has no parameter that requires a gradient: use it "
            "without the wrapper"
        )
    for name, p in named:
        if isinstance(p, UninitializedParameter):
            raise ArgumentError(
                f"parameter {name} has no shape yet: run a forward of the lazy module first"
            )
    for name, child in module.named_modules():
        if isinstance(child, nn.Embedding | nn.EmbeddingBag) and child.sparse:
            raise NotSupportedError(
                f"{name} makes sparse gradients, which are not supported yet: use sparse=False"
            )
    return named


def resolve_caps(cap_mb: float | None, cap_mb_list: Sequence[float] | None) -> list[int] | None:
    """Bucket limits in bytes; None, the reducer's own, if none are given.

    Raises:
        ArgumentError: Both are given, or one is not positive.

    Example:
        >>> resolve_caps(2, None) == [2 << 20], resolve_caps(None, None)
        (True, None)
    """
    if cap_mb is not None and cap_mb_list is not None:
        raise ArgumentError(
            f"bucket_cap_mb={cap_mb} and bucket_cap_mb_list={list(cap_mb_list)} are both given: "
            "give one"
        )
    if cap_mb is None and cap_mb_list is None:
        return None
    given = [cap_mb] if cap_mb is not None else list(cap_mb_list or ())
    if not given or any(mb <= 0 for mb in given):
        name = "bucket_cap_mb" if cap_mb is not None else "bucket_cap_mb_list"
        raise ArgumentError(f"{name} is {given}: give MiB above 0")
    return [max(1, int(mb * (1 << 20))) for mb in given]


def resolve_device(
    named: Sequence[tuple[str, Parameter]],
    device_ids: Sequence[int | torch.device] | None,
    output_device: int | torch.device | None,
) -> torch.device | None:
    """The device that inputs are moved to, or None.

    Raises:
        ArgumentError: `device_ids` and `output_device` do not name the module's one accelerator.
    """
    given = [*(device_ids or ()), *([] if output_device is None else [output_device])]
    if not given:
        return None
    devices = {p.device for _, p in named}
    one = next(iter(devices))
    if len(devices) > 1 or one.type == "cpu":
        raise ArgumentError(
            f"device_ids={device_ids}, output_device={output_device}: the module's parameters are "
            f"on {sorted(map(str, devices))}; these arguments are for a module on one accelerator"
        )
    wanted = {torch.device(one.type, d) if isinstance(d, int) else torch.device(d) for d in given}
    if wanted != {one} or len(device_ids or ()) > 1:
        raise ArgumentError(
            f"device_ids={device_ids}, output_device={output_device}: the module is on {one}, "
            "name that device"
        )
    return one
