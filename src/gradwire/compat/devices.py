"""torch.nn.parallel, implemented by gradwire.devices, with PyTorch's signatures."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from gradwire import devices as ours
from gradwire.compat.replacements import Replacement, as_runtime_error
from gradwire.devices import HOST, Device, default_devices


class Broadcast:
    """`apply` of PyTorch's autograd function: copies of all inputs, ordered by device."""

    @staticmethod
    def apply(target_gpus: Sequence[Device], *inputs: Tensor) -> tuple[Tensor, ...]:
        """Return the copies as a flat tuple."""
        return tuple(t for r in ours.broadcast_coalesced(inputs, target_gpus) for t in r)


class ReduceAddCoalesced:
    """`apply` of PyTorch's autograd function: sums of tensors that are ordered by device."""

    @staticmethod
    def apply(destination: Device, num_inputs: int, *grads: Tensor) -> tuple[Tensor, ...]:
        """Return the `num_inputs` sums."""
        lists = [grads[i : i + num_inputs] for i in range(0, len(grads), num_inputs)]
        return ours.reduce_add_coalesced(lists, destination)


class Scatter:
    """`apply` of PyTorch's autograd function."""

    @staticmethod
    def apply(
        target_gpus: Sequence[Device], chunk_sizes: Sequence[int] | None, dim: int, input: Tensor
    ) -> tuple[Tensor, ...]:
        """Return the chunks."""
        return ours.scatter(input, target_gpus, chunk_sizes, dim)


class Gather:
    """`apply` of PyTorch's autograd function."""

    @staticmethod
    def apply(target_device: Device, dim: int, *inputs: Tensor) -> Tensor:
        """Return the concatenation."""
        return ours.gather(inputs, dim, target_device)


def scatter(inputs: Any, target_gpus: Sequence[Device], dim: int = 0) -> Any:
    """See gradwire.devices.scatter_nested; returns a tuple for a single tensor, as in PyTorch."""
    parts = ours.scatter_nested(inputs, target_gpus, dim)
    return tuple(parts) if isinstance(inputs, Tensor) else parts


def scatter_kwargs(
    inputs: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
    target_gpus: Sequence[Device],
    dim: int = 0,
) -> tuple[tuple[Any, ...], tuple[dict[str, Any], ...]]:
    """See gradwire.devices.scatter_kwargs; returns empty tuples for a call without arguments."""
    if not inputs and not kwargs:
        return (), ()
    return ours.scatter_kwargs(inputs, kwargs, target_gpus, dim)


def gather(outputs: Any, target_device: Device, dim: int = 0) -> Any:
    """See gradwire.devices.gather_nested."""
    return ours.gather_nested(outputs, target_device, dim)


def replicate(network: Module, devices: Sequence[Device], detach: bool = False) -> list[Module]:
    """See gradwire.devices.replicate."""
    return ours.replicate(network, devices, detach) if devices else []


def parallel_apply(
    modules: Sequence[Module],
    inputs: Sequence[Any],
    kwargs_tup: Sequence[dict[str, Any]] | None = None,
    devices: Sequence[Device | None] | None = None,
) -> list[Any]:
    """See gradwire.devices.parallel_apply."""
    return ours.parallel_apply(modules, inputs, kwargs_tup, devices)


def data_parallel(
    module: Module,
    inputs: Any,
    device_ids: Sequence[Device] | None = None,
    output_device: Device | None = None,
    dim: int = 0,
    module_kwargs: Any | None = None,
) -> Any:
    """See gradwire.devices.data_parallel."""
    return ours.data_parallel(module, inputs, device_ids, output_device, dim, module_kwargs)


class DataParallel(ours.DataParallel[Module]):
    """gradwire.devices.DataParallel with PyTorch's arguments and attributes.

    As in PyTorch, on a machine without accelerators it calls the module directly, unless
    `device_ids` lists "cpu"; and it moves the module to the device if there is only one.
    """

    def __init__(
        self,
        module: Module,
        device_ids: Sequence[Device] | None = None,
        output_device: Device | None = None,
        dim: int = 0,
    ) -> None:
        alone = default_devices() == (HOST,) and _are_accelerators(device_ids)
        given = (None, None) if alone else (device_ids, output_device)
        super().__init__(module, *given, dim)
        self.device_ids = [] if alone else [d if d.index is None else d.index for d in self.devices]
        if len(self.device_ids) == 1:
            self.module.to(self.devices[0])

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Return the module's outputs for the whole batch."""
        if not self.device_ids:
            return self.module(*inputs, **kwargs)
        return super().forward(*inputs, **kwargs)


def _are_accelerators(device_ids: Sequence[Device] | None) -> bool:
    """Return True if all entries are indices or accelerators; None means all accelerators."""
    try:
        return all(
            isinstance(d, int) or torch.device(d).type not in ("cpu", "meta")
            for d in (() if device_ids is None else device_ids)
        )
    except (RuntimeError, TypeError):  # invalid entries: the constructor raises
        return False


_COMM = ("torch.nn.parallel.comm", "torch.cuda.comm")
_FUNCTIONS = "torch.nn.parallel._functions"
_NESTED = "torch.nn.parallel.scatter_gather"
_REPLICATE = "torch.nn.parallel.replicate"
_APPLY = "torch.nn.parallel.parallel_apply"
_MODULE = "torch.nn.parallel.data_parallel"
_DDP = "torch.nn.parallel.distributed"
_PACKAGE = "torch.nn.parallel"


# Functions with PyTorch's warnings, which accept arguments that gradwire rejects.


def _comm_gather(
    tensors: Sequence[Tensor],
    dim: int = 0,
    destination: Device | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """See gradwire.devices.gather."""
    if destination == -1 and out is None:
        warnings.warn(
            "Using -1 to represent CPU tensor is deprecated: pass a device object or string",
            FutureWarning,
            stacklevel=3,
        )
    return ours.gather(tensors, dim, destination, out=out)


def _reduce_add_coalesced(
    inputs: Sequence[Sequence[Tensor]],
    destination: Device | None = None,
    buffer_size: int = 10485760,
) -> tuple[Tensor, ...]:
    """See gradwire.devices.reduce_add_coalesced; returns () for no inputs."""
    return ours.reduce_add_coalesced(inputs, destination, buffer_size) if inputs else ()


TABLE = (
    Replacement(as_runtime_error(ours.broadcast), "broadcast", _COMM),
    Replacement(as_runtime_error(ours.broadcast_coalesced), "broadcast_coalesced", _COMM),
    Replacement(as_runtime_error(ours.reduce_add), "reduce_add", _COMM),
    Replacement(as_runtime_error(_reduce_add_coalesced), "reduce_add_coalesced", _COMM),
    Replacement(as_runtime_error(ours.scatter), "scatter", _COMM),
    Replacement(as_runtime_error(_comm_gather), "gather", _COMM),
    Replacement(Broadcast, "Broadcast", (_FUNCTIONS,)),
    Replacement(ReduceAddCoalesced, "ReduceAddCoalesced", (_FUNCTIONS,)),
    Replacement(Scatter, "Scatter", (_FUNCTIONS, _NESTED)),
    Replacement(Gather, "Gather", (_FUNCTIONS, _NESTED)),
    Replacement(scatter, "scatter", (_NESTED, _PACKAGE)),
    Replacement(scatter_kwargs, "scatter_kwargs", (_NESTED, _MODULE, _DDP)),
    Replacement(gather, "gather", (_NESTED, _MODULE, _DDP, _PACKAGE)),
    Replacement(replicate, "replicate", (_REPLICATE, _MODULE, _PACKAGE)),
    Replacement(parallel_apply, "parallel_apply", (_APPLY, _MODULE, _PACKAGE)),
    Replacement(data_parallel, "data_parallel", (_MODULE, _PACKAGE)),
    Replacement(DataParallel, "DataParallel", (_MODULE, _PACKAGE, "torch.nn")),
)
"""Replacements, and the modules of PyTorch that receive them."""
