"""Replicas of a module: its tree copied for each place, its tensors broadcast.

A replica's parameters are no leaves: gradients flow through them into the module's own.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.parameter import is_lazy

from gradwire.devices.functional import broadcast_lists
from gradwire.devices.placement import Device, as_devices
from gradwire.errors import ArgumentError, NotSupportedError

M = TypeVar("M", bound=Module)


def replicate(module: M, devices: Iterable[Device], detach: bool = False) -> list[M]:
    """Replicas of a module, one for each device.

    Args:
        module: Its parameters and buffers are on the first of `devices`.
        devices: The places, k of them; one device several times is several places.
        detach: Cut the replicas off from the module's gradients.

    Returns:
        k modules of the same types. Their parameters are plain attributes, not leaves; the first
        replica's share storage with the module's, and its buffers are the module's own.

    Adjoint: `reduce_add_coalesced` of the replicas' gradients to the module's; zeros for a
    parameter that no replica has used, as PyTorch has it.

    Raises:
        ArgumentError: A parameter or buffer on another device, or not yet initialised.
        NotSupportedError: A TorchScript module, or one that torch.compile made.

    Example:
        >>> first, second = replicate(torch.nn.Linear(2, 1), ["cpu", "cpu"])
        >>> torch.equal(first.weight, second.weight)
        True
    """
    places = as_devices(devices)
    for name, child in module.named_modules():
        if isinstance(child, torch.jit.ScriptModule):
            raise NotSupportedError(
                f"module has a TorchScript module at {name!r}: replicate the eager one"
            )
        if "_orig_mod" in child._modules:
            raise NotSupportedError(
                f"module has one that torch.compile made at {name!r}: its replicas would write "
                "into it. Give the module that was compiled"
            )
    check_home(module, places[0])
    parameters, buffers = list(module.parameters()), list(module.buffers())
    with torch.set_grad_enabled(torch.is_grad_enabled() and not detach):
        copied = zip(
            broadcast_lists(parameters, places, zeros=True),
            broadcast_lists(buffers, places),
            strict=True,
        )
    ids = [id(t) for t in (*parameters, *buffers)]
    replicas = []
    for tensors in copied:
        given = [t.detach() if detach and t.requires_grad else t for t in itertools.chain(*tensors)]
        replicas.append(_assembled(module, dict(zip(ids, given, strict=True))))
    return replicas


def check_home(module: Module, home: torch.device) -> None:
    """Refuse a module with a parameter or buffer elsewhere, or without a value."""
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if is_lazy(tensor):
            raise ArgumentError(f"{name} is not initialised: run the module once first")
        if tensor.device != home:
            raise ArgumentError(
                f"module must have its parameters and buffers on device {home}, the first of "
                f"devices, but {name} is on {tensor.device}: move the module there"
            )


def _assembled(module: M, tensors: dict[int, Tensor]) -> M:
    """A copy of the module's tree that holds the given tensors in place of its own."""
    replicas: dict[Module, Any] = {}
    for original in module.modules():
        replicas[original] = cast("Any", original)._replicate_for_data_parallel()
        # Modules that ask for their parameters while they run find them here.
        replicas[original]._former_parameters = {}
        # What Module.compile made calls the original, with its parameters.
        replicas[original]._compiled_call_impl = None
    for original, replica in replicas.items():
        for name, child in original._modules.items():
            if child is not None:
                setattr(replica, name, replicas[child])
        for name, parameter in original._parameters.items():
            if parameter is None:
                replica._parameters[name] = None
            else:
                setattr(replica, name, tensors[id(parameter)])
                replica._former_parameters[name] = tensors[id(parameter)]
        for name, buffer in original._buffers.items():
            if buffer is not None:
                setattr(replica, name, tensors[id(buffer)])
    return cast("M", replicas[module])
