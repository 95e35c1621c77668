"""DataParallel: cut the batch, run a replica for each chunk, join what they return."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeAlias, TypeVar, cast

import torch
from torch.nn import Module

from gradwire.devices.buffers import BufferPolicy, BufferTracker, check_policy
from gradwire.devices.nested import gather_nested, scatter_kwargs
from gradwire.devices.parallel_apply import parallel_apply, refuse_in_transforms
from gradwire.devices.placement import Device, as_destination, as_devices, default_devices
from gradwire.devices.replicate import check_home, replicate
from gradwire.errors import ArgumentError, ArgumentTypeError

M = TypeVar("M", bound=Module)
Scatter: TypeAlias = Callable[
    [tuple[Any, ...], dict[str, Any], Sequence[Device]],
    tuple[Sequence[tuple[Any, ...]], Sequence[dict[str, Any]]],
]


class DataParallel(Module, Generic[M]):
    """Runs a module on several devices of one process, each with a part of the batch.

    The first device holds the module. Each forward cuts the inputs along `dim`, gives every
    device a replica, runs them in threads and joins the outputs. The gradients of all replicas are
    summed into the module's parameters.

    Args:
        module: Its parameters and buffers are on the first device by the time it runs.
        devices: The places, k of them; one device several times is several places. All
            accelerators if None, or the host once where there are none.
        output_device: Where the outputs go; the first device if None.
        dim: The batch's dim in all inputs and outputs.
        buffers: What becomes of buffers that replicas write. "first": the first replica's are
            kept, the others' lost. "mean": floating-point buffers move by the mean of all
            replicas' changes, the others are the first replica's. "error": a forward in which
            another replica wrote a buffer raises. A buffer that is assigned counts as written.
        scatter: Cuts the inputs instead: `scatter(inputs, kwargs, devices)` gets the call's
            positional and named arguments, and returns two lists of the same length, the tuple of
            positional arguments and the dict of named ones for each replica. There are as many
            replicas, at least one and at most k, on the first of the devices. It moves tensors
            itself.

    Example:
        >>> model = DataParallel(torch.nn.Linear(3, 1), ["cpu"] * 2)
        >>> model(torch.zeros(5, 3)).shape  # the replicas see 3 rows and 2
        torch.Size([5, 1])

        A list of graphs of several sizes is dealt out, instead of a batch that is cut.

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
        """The module's outputs for the whole batch.

        Raises:
            ArgumentError: Inputs with different batch sizes; outputs of different structure; what
                `scatter` returned cannot be used; a parameter that is not on the first device;
                buffers that go against the policy.
            NotSupportedError: Several devices inside torch.func's transforms.
            Exception: What the module raised in the first replica that failed.
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
        """The replicas of one forward; a subclass may make them otherwise."""
        return replicate(module, devices, not torch.is_grad_enabled())

    def scatter(
        self, inputs: tuple[Any, ...], kwargs: dict[str, Any], devices: Sequence[Device]
    ) -> tuple[Sequence[tuple[Any, ...]], Sequence[dict[str, Any]]]:
        """Return each replica's arguments; a subclass may cut them otherwise."""
        if self._own_scatter is not None:
            return _check_scattered(*_pair(self._own_scatter(inputs, kwargs, devices)), devices)
        return scatter_kwargs(inputs, kwargs, devices, self.dim)

    def parallel_apply(
        self, replicas: Sequence[M], inputs: Sequence[Any], kwargs: Sequence[dict[str, Any]]
    ) -> list[Any]:
        """Each replica's outputs; a subclass may run them otherwise."""
        return parallel_apply(replicas, inputs, kwargs, self.devices[: len(replicas)])

    def gather(self, outputs: Sequence[Any], output_device: Device) -> Any:
        """The outputs in one; a subclass may join them otherwise."""
        return gather_nested(outputs, output_device, self.dim)


def _pair(result: Any) -> tuple[Any, Any]:
    """Return the two lists that a scatter function made.

    Raises:
        ArgumentTypeError: It returned something else.
    """
    if isinstance(result, tuple | list) and len(result) == 2:
        args, named = result
        if isinstance(args, tuple | list) and isinstance(named, tuple | list):
            return args, named
    raise ArgumentTypeError(
        f"scatter returned {result!r}: return two lists, with the positional and the named "
        "arguments of each replica"
    )


def _check_scattered(
    args: Sequence[Any], named: Sequence[Any], devices: Sequence[Device]
) -> tuple[Sequence[tuple[Any, ...]], Sequence[dict[str, Any]]]:
    """Raise if there are not arguments for each of some replicas.

    Raises:
        ArgumentError: Lists of other lengths.
        ArgumentTypeError: An entry is no tuple, or no dict.
    """
    if not 1 <= len(args) == len(named) <= len(devices):
        raise ArgumentError(
            f"scatter returned positional arguments for {len(args)} replicas and named ones for "
            f"{len(named)}: return as many of both, at least 1 and at most {len(devices)}, one for "
            "each device that takes part"
        )
    for i, (given, names) in enumerate(zip(args, named, strict=True)):
        if not isinstance(given, tuple | list) or not isinstance(names, dict):
            raise ArgumentTypeError(
                f"scatter returned a {type(given).__name__} and a {type(names).__name__} for "
                f"replica {i}: return a tuple of its positional arguments and a dict of its named "
                "ones"
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
    """Call a module once as `DataParallel` would.

    Args:
        module: Its parameters and buffers are on the first of `devices`.
        inputs: The tuple of positional arguments, or the only one; None for none.
        devices: The places; all accelerators if None, or the host once where there are none.
        output_device: Where the outputs go; the first device if None.
        dim: The batch's dim in all inputs and outputs.
        module_kwargs: Named arguments.
        buffers: As for `DataParallel`.
        scatter: As for `DataParallel`.

    Example:
        >>> data_parallel(torch.nn.Linear(3, 1), torch.zeros(5, 3), ["cpu"] * 2).shape
        torch.Size([5, 1])
    """
    arguments = inputs if isinstance(inputs, tuple) else (() if inputs is None else (inputs,))
    runner = DataParallel(module, devices, output_device, dim, buffers=buffers, scatter=scatter)
    return cast("Any", runner)(*arguments, **(module_kwargs or {}))
