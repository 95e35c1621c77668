"""Replicas of a module: the module tree is copied for each device, its tensors are broadcast.

A replica's parameters are not leaves: gradients flow through them to the module's parameters.
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
    """Replicate a module to each device.

    Args:
        module: Module, whose parameters and buffers must be on the first of `devices`.
        devices: List of k devices. A device may be listed several times, for several replicas.
        detach: True to disconnect the replicas from the gradients of the module.

    Returns:
        A list of k modules of the same types. Their parameters are plain attributes, not leaves.
        The first replica shares the storage of the module's parameters, and has the module's
        buffers.

    Adjoint: `reduce_add_coalesced` of the replicas' gradients; zeros for a parameter that no
    replica used, as in PyTorch.

    Raises:
        ArgumentError: A parameter or buffer is on another device, or is not initialized.
        NotSupportedError: The module contains a TorchScript or compiled module.

    Example:
        >>> first, second = replicate(torch.nn.Linear(2, 1), ["cpu", "cpu"])
        >>> torch.equal(first.weight, second.weight)
        True
    """
    places = as_devices(devices)
    for name, child in module.named_modules():
        if isinstance(child, torch.jit.ScriptModule):
            raise NotSupportedError(
                f"module has a TorchScript module at {name!r}: replicate the eager module"
            )
        if "_orig_mod" in child._modules:
            raise NotSupportedError(
                f"module has a module compiled with torch.compile at {name!r}, into which its "
                "replicas would write: replicate the module before compiling"
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
    """Raise if a parameter or buffer is uninitialized or on another device than `home`."""
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if is_lazy(tensor):
            raise ArgumentError(f"{name} is not initialized: run the module once first")
        if tensor.device != home:
            raise ArgumentError(
                f"module must have its parameters and buffers on device {home}, the first of "
                f"devices, but {name} is on {tensor.device}: move the module there"
            )


def _assembled(module: M, tensors: dict[int, Tensor]) -> M:
    """Copy the module tree, with the given tensors in place of the originals."""
    replicas: dict[Module, Any] = {}
    for original in module.modules():
        replicas[original] = cast("Any", original)._replicate_for_data_parallel()
        # Modules that look up their parameters in forward find them in this attribute.
        replicas[original]._former_parameters = {}
        # The compiled call of Module.compile would run the original module.
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
