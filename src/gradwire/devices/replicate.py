"""Replicas of a module, and policies for the buffers that they write.

The module tree is copied for each device, and its tensors are broadcast. A replica's parameters are
not leaves: gradients flow through them to the module's parameters. The first replica has the
module's own buffers. The other replicas have copies, which are discarded.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, TypeAlias, TypeVar, cast, get_args

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.parameter import is_lazy

from gradwire._torch import run_as_written
from gradwire.devices.copying import local
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


@run_as_written  # PyTorch 2.11's compiler warns of a method that this calls
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


BufferPolicy: TypeAlias = Literal["first", "mean", "error"]


def check_policy(policy: str) -> None:
    """Raise if the policy does not exist."""
    if policy not in get_args(BufferPolicy):
        raise ArgumentError(f'buffers is {policy!r}: give "first", "mean" or "error"')


class BufferTracker:
    """Records the buffers passed to the replicas, and applies the policy after the forward.

    Version counters do not show all writes: batch norm updates its statistics without incrementing
    them. A module may also assign a new tensor to a buffer, instead of writing into the old one.
    """

    def __init__(self, module: Module, policy: BufferPolicy, first: Module) -> None:
        self.policy = policy
        self.before: dict[str, Tensor] = {}
        if policy != "first":
            self.before = {n: b.detach().clone() for n, b in _buffers(module) if b is not None}
        copied: dict[int, Tensor] = {}
        if policy == "mean":
            # The mean is written into the module's buffers, which the first replica's backward must
            # therefore not have saved.
            for name, given in _buffers(first):
                if name in self.before and given is not None and not given.requires_grad:
                    # one copy for all names of a buffer, so that they continue to share memory
                    copy = copied.setdefault(id(given), self.before[name].clone())
                    _assign(first, name, copy)
        self.given = dict(_buffers(first))

    @torch.no_grad()
    def apply_policy(self, module: Module, replicas: Sequence[Module]) -> None:
        """Apply the policy.

        Raises:
            ArgumentError: The policy is "error", and a replica other than the first wrote a buffer;
                or it is "mean", and a replica's buffer has another shape.
        """
        own, written = dict(_buffers(module)), [dict(_buffers(replica)) for replica in replicas]
        for name, tensor in own.items():
            before, new = self.before.get(name), written[0].get(name)
            assigned = new is not self.given.get(name)
            if self.policy == "error":
                _refuse_written(name, before, [buffers.get(name) for buffers in written])
            elif before is not None and (before.is_floating_point() or before.is_complex()):
                after = [_at(buffers.get(name), before.device) for buffers in written]
                new = _moved_by_mean(name, before, after)
            if assigned:
                _assign(module, name, new)  # other names of the old buffer keep it
            elif self.policy == "mean":
                _write(tensor, new)


def _buffers(module: Module) -> Iterator[tuple[str, Tensor | None]]:
    """Yield names and values of all buffers, including None, and every name of shared ones."""
    for prefix, owner in module.named_modules():
        for key, value in owner._buffers.items():
            yield f"{prefix}.{key}" if prefix else key, value


def _assign(module: Module, name: str, value: Tensor | None) -> None:
    prefix, _, key = name.rpartition(".")
    module.get_submodule(prefix)._buffers[key] = value


def _write(target: Tensor | None, value: Tensor | None) -> None:
    """Copy a value into a buffer if it differs, so that unchanged buffers keep their version."""
    if target is not None and value is not None and not torch.equal(target, value):
        target.copy_(value)


def _at(value: Tensor | None, device: torch.device) -> Tensor | None:
    return None if value is None else local(value.detach(), device)


def _moved_by_mean(name: str, before: Tensor, after: Sequence[Tensor | None]) -> Tensor:
    """Return the previous value plus the mean of the replicas' changes.

    Half precision is summed in float32, which has the precision and range for the sum.
    """
    half = before.is_floating_point() and before.dtype.itemsize < 4
    start = before.float() if half else before
    change = torch.zeros_like(start)
    for i, value in enumerate(after):
        if value is None or value.shape != before.shape:
            found = None if value is None else tuple(value.shape)
            raise ArgumentError(
                f'buffers is "mean", and replica {i} made the buffer {name}, of shape '
                f"{tuple(before.shape)}, one of {found}: these have no mean. Keep the shape, or "
                'use buffers="first" (the first replica\'s)'
            )
        # skip equal values, because the difference of infinities is NaN
        change += torch.where(value == before, 0, value.to(start.dtype) - start)
    return (start + change / len(after)).to(before.dtype)


def _refuse_written(name: str, before: Tensor | None, after: Sequence[Tensor | None]) -> None:
    for i, value in enumerate(after[1:], 1):
        if not _same(value, before):
            raise ArgumentError(
                f'buffers is "error", and replica {i} wrote the buffer {name}: its value would be '
                'lost. Freeze the buffer, or use buffers="mean" (of all replicas) or "first" (the '
                "first replica's)"
            )


def _same(value: Tensor | None, before: Tensor | None) -> bool:
    if value is None or before is None:
        return value is before
    return value.dtype == before.dtype and torch.equal(local(value.detach(), before.device), before)
