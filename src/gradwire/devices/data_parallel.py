"""DataParallel: scatter the batch, run a replica on each chunk, gather the outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeAlias, TypeVar, cast

import torch
from torch.nn import Module

from gradwire.devices.parallel_apply import parallel_apply, refuse_in_transforms
from gradwire.devices.placement import Device, as_destination, as_devices, default_devices
from gradwire.devices.replicate import (
    BufferPolicy,
    BufferTracker,
    check_home,
    check_policy,
    replicate,
)
from gradwire.devices.scatter_gather import gather_nested, scatter_kwargs
from gradwire.errors import ArgumentError, ArgumentTypeError

M = TypeVar("M", bound=Module)
Scatter: TypeAlias = Callable[
    [tuple[Any, ...], dict[str, Any], Sequence[Device]],
    tuple[Sequence[tuple[Any, ...]], Sequence[dict[str, Any]]],
]


class DataParallel(Module, Generic[M]):
    """Module wrapper that runs on several devices of one process, each with a part of the batch.

    The module is on the first device. Each forward splits the inputs along `dim`, replicates the
    module to every device, runs the replicas in threads and concatenates the outputs. The gradients
    of all replicas are summed into the module's parameters.

    Args:
        module: Module, whose parameters and buffers must be on the first device when it runs.
        devices: List of k devices. A device may be listed several times, for several replicas. All
            accelerators if None, or the CPU if there are none.
        output_device: Device of the outputs; the first device if None.
        dim: Batch dim of all inputs and outputs.
        buffers: Policy for buffers that replicas write. "first" keeps the first replica's and
            discards those of the others. "mean" adds the mean of all replicas' changes to
            floating-point buffers, and keeps the first replica's other buffers. "error" raises if
            a replica other than the first wrote a buffer. Assigning a buffer counts as writing it.
        scatter: Function that replaces the split of inputs: `scatter(inputs, kwargs, devices)`
            takes the positional and keyword arguments of the call, and returns two lists of the
            same length, with a tuple of positional arguments and a dict of keyword arguments for
            each replica. There may be between 1 and k replicas, which run on the first devices of
            the list. The function must move tensors itself.

    Example:
        >>> model = DataParallel(torch.nn.Linear(3, 1), ["cpu"] * 2)
        >>> model(torch.zeros(5, 3)).shape  # the replicas see 3 rows and 2
        torch.Size([5, 1])

        Distribute a list of graphs of different sizes, instead of splitting a batch.

        >>> def deal(inputs, kwargs, devices):
        ...     parts = [inputs[0][i :: len(devices)] for i in range(len(devices))]
        ...     return [(part,) for part in parts if part], [kwargs for part in parts if part]
        >>> class Sizes(torch.nn.Module):
        ...     def forward(self, graphs):
        ...         return torch.tensor([len(graph) for graph in graphs])
        >>> model = DataParallel(Sizes(), ["cpu"] * 2, scatter=deal)
        >>> model([torch.zeros(1), torch.zeros(2), torch.zeros(3)])
        tensor([1, 3, 2])
    """

    def __init__(
        self,
        module: M,
        devices: Iterable[Device] | None = None,
        output_device: Device | None = None,
        dim: int = 0,
        *,
        buffers: BufferPolicy = "first",
        scatter: Scatter | None = None,
    ) -> None:
        super().__init__()
        check_policy(buffers)
        if not isinstance(module, Module):
            raise ArgumentTypeError(f"module is a {type(module).__name__}: give a torch.nn.Module")
        if not isinstance(dim, int):
            raise ArgumentTypeError(f"dim is {dim!r}, a {type(dim).__name__}: give an int")
        self.module = module
        self.devices = default_devices() if devices is None else as_devices(devices)
        self.output_device = as_destination(output_device, self.devices[0], "output_device")
        self.dim = dim
        self.buffer_policy = buffers
        if scatter is not None and not callable(scatter):
            raise ArgumentTypeError(
                f"scatter is {scatter!r}: give a function of inputs, kwargs and devices"
            )
        self._own_scatter = scatter

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Return the module's outputs for the whole batch.

        Raises:
            ArgumentError: Inputs have different batch sizes, outputs have different structures, the
                result of `scatter` is invalid, a parameter is not on the first device, or a buffer
                violates the policy.
            NotSupportedError: There are several devices inside a `torch.func` transform.
            Exception: The exception that the module raised in the first replica that failed.
        """
        if len(self.devices) > 1:
            refuse_in_transforms(f"DataParallel on {len(self.devices)} devices")
        check_home(self.module, self.devices[0])
        chunks, named = self.scatter(inputs, kwargs, self.devices)
        if self._own_scatter is None and not inputs and not kwargs:
            chunks, named = chunks[:1], named[:1]
        if len(self.devices) == 1 and self.output_device == self.devices[0]:
            return self.module(*chunks[0], **named[0])
        replicas = self.replicate(self.module, self.devices[: len(chunks)])
        tracker = BufferTracker(self.module, self.buffer_policy, replicas[0])
        outputs = self.parallel_apply(replicas, chunks, named)
        tracker.apply_policy(self.module, replicas)
        return self.gather(outputs, self.output_device)

    def replicate(self, module: M, devices: Sequence[Device]) -> list[M]:
        """Return the replicas of one forward; subclasses may override this method."""
        return replicate(module, devices, not torch.is_grad_enabled())

    def scatter(
        self, inputs: tuple[Any, ...], kwargs: dict[str, Any], devices: Sequence[Device]
    ) -> tuple[Sequence[tuple[Any, ...]], Sequence[dict[str, Any]]]:
        """Return each replica's arguments; subclasses may override this method."""
        if self._own_scatter is not None:
            return _check_scattered(*_pair(self._own_scatter(inputs, kwargs, devices)), devices)
        return scatter_kwargs(inputs, kwargs, devices, self.dim)

    def parallel_apply(
        self, replicas: Sequence[M], inputs: Sequence[Any], kwargs: Sequence[dict[str, Any]]
    ) -> list[Any]:
        """Return each replica's outputs; subclasses may override this method."""
        return parallel_apply(replicas, inputs, kwargs, self.devices[: len(replicas)])

    def gather(self, outputs: Sequence[Any], output_device: Device) -> Any:
        """Return the joined outputs; subclasses may override this method."""
        return gather_nested(outputs, output_device, self.dim)


def _pair(result: Any) -> tuple[Any, Any]:
    """Return the two lists that a scatter function returned.

    Raises:
        ArgumentTypeError: The result is not two lists.
    """
    if isinstance(result, tuple | list) and len(result) == 2:
        args, named = result
        if isinstance(args, tuple | list) and isinstance(named, tuple | list):
            return args, named
    raise ArgumentTypeError(
        f"scatter returned {result!r}: return two lists, of positional and of keyword arguments "
        "for each replica"
    )


def _check_scattered(
    args: Sequence[Any], named: Sequence[Any], devices: Sequence[Device]
) -> tuple[Sequence[tuple[Any, ...]], Sequence[dict[str, Any]]]:
    """Raise unless the two lists hold arguments for the same replicas.

    Raises:
        ArgumentError: The lengths of the lists differ, or do not match the devices.
        ArgumentTypeError: An entry is not a tuple or a dict.
    """
    if not 1 <= len(args) == len(named) <= len(devices):
        raise ArgumentError(
            f"scatter returned positional arguments for {len(args)} replicas and keyword arguments "
            f"for {len(named)}: return both for the same number of replicas, from 1 to "
            f"{len(devices)}"
        )
    for i, (given, names) in enumerate(zip(args, named, strict=True)):
        if not isinstance(given, tuple | list) or not isinstance(names, dict):
            raise ArgumentTypeError(
                f"scatter returned a {type(given).__name__} and a {type(names).__name__} for "
                f"replica {i}: return a tuple of its positional arguments and a dict of its "
                "keyword arguments"
            )
    return args, named


def data_parallel(
    module: Module,
    inputs: Any,
    devices: Iterable[Device] | None = None,
    output_device: Device | None = None,
    dim: int = 0,
    module_kwargs: dict[str, Any] | None = None,
    *,
    buffers: BufferPolicy = "first",
    scatter: Scatter | None = None,
) -> Any:
    """Call a module once, as `DataParallel` does.

    Args:
        module: Module, whose parameters and buffers must be on the first of `devices`.
        inputs: Tuple of positional arguments, or a single argument; None for none.
        devices: List of devices; all accelerators if None, or the CPU if there are none.
        output_device: Device of the outputs; the first device if None.
        dim: Batch dim of all inputs and outputs.
        module_kwargs: Keyword arguments.
        buffers: Policy for buffers, as for `DataParallel`.
        scatter: Function that splits the inputs, as for `DataParallel`.

    Example:
        >>> data_parallel(torch.nn.Linear(3, 1), torch.zeros(5, 3), ["cpu"] * 2).shape
        torch.Size([5, 1])
    """
    arguments = inputs if isinstance(inputs, tuple) else (() if inputs is None else (inputs,))
    runner = DataParallel(module, devices, output_device, dim, buffers=buffers, scatter=scatter)
    return cast("Any", runner)(*arguments, **(module_kwargs or {}))
