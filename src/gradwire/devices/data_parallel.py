"""DataParallel: scatter the batch, run a replica on each chunk in a thread, gather the outputs.

The module tree is copied for each device, and its tensors are broadcast. A replica's parameters are
not leaves: gradients flow through them to the module's parameters. The first replica has the
module's own buffers. The other replicas have copies, which are discarded.
"""

from __future__ import annotations

import contextlib
import contextvars
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, Literal, TypeAlias, TypeVar, cast, get_args

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.parameter import is_lazy

from gradwire._containers import tensors_in
from gradwire._torch import run_as_written
from gradwire.devices.broadcast_reduce import broadcast_lists
from gradwire.devices.copying import has_streams, local
from gradwire.devices.placement import (
    Device,
    as_destination,
    as_device,
    as_devices,
    default_devices,
)
from gradwire.devices.scatter_gather import gather_nested, scatter_kwargs
from gradwire.errors import ArgumentError, ArgumentTypeError, NotSupportedError

M = TypeVar("M", bound=Module)
Modes: TypeAlias = Callable[[], contextlib.AbstractContextManager[None]]


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
    _check_home(module, places[0])
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


def _check_home(module: Module, home: torch.device) -> None:
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


BufferPolicy: TypeAlias = Literal["first", "mean"]


class _BufferTracker:
    """Records the buffers passed to the replicas, and applies the policy after the forward."""

    def __init__(self, module: Module, policy: BufferPolicy, first: Module) -> None:
        self.before: dict[str, Tensor] = {}
        if policy == "mean":
            self.before = {n: b.detach().clone() for n, b in _buffers(module) if b is not None}
            # The mean is written into the module's buffers, which the first replica's backward must
            # therefore not have saved.
            copied: dict[int, Tensor] = {}
            for name, given in _buffers(first):
                if name in self.before and given is not None and not given.requires_grad:
                    # one copy for all names of a buffer, so that they continue to share memory
                    copy = copied.setdefault(id(given), self.before[name].clone())
                    _assign(first, name, copy)
        # Version counters do not show all writes: batch norm updates its statistics without
        # incrementing them. A module may also assign a new tensor to a buffer, instead of writing
        # into the old one.
        self.given = dict(_buffers(first))

    @torch.no_grad()
    def apply_policy(self, module: Module, replicas: Sequence[Module]) -> None:
        written = [dict(_buffers(replica)) for replica in replicas]
        for name, tensor in dict(_buffers(module)).items():
            before, new = self.before.get(name), written[0].get(name)
            assigned = new is not self.given.get(name)
            if before is not None and (before.is_floating_point() or before.is_complex()):
                new = _moved_by_mean(name, before, [buffers.get(name) for buffers in written])
            if assigned:
                _assign(module, name, new)  # other names of the old buffer keep it
            elif before is not None:
                assert tensor is not None
                assert new is not None
                if not torch.equal(tensor, new):  # unchanged buffers keep their version
                    tensor.copy_(new)


def _buffers(module: Module) -> Iterator[tuple[str, Tensor | None]]:
    """Yield names and values of all buffers, including None, and every name of shared ones."""
    for prefix, owner in module.named_modules():
        for key, value in owner._buffers.items():
            yield f"{prefix}.{key}" if prefix else key, value


def _assign(module: Module, name: str, value: Tensor | None) -> None:
    prefix, _, key = name.rpartition(".")
    module.get_submodule(prefix)._buffers[key] = value


def _moved_by_mean(name: str, before: Tensor, after: Sequence[Tensor | None]) -> Tensor:
    """Return the previous value plus the mean of the replicas' changes."""
    # Half precision is summed in float32, which has the precision and range for the sum.
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
        value = local(value.detach(), before.device)
        change += torch.where(value == before, 0, value.to(start.dtype) - start)
    return (start + change / len(after)).to(before.dtype)


def parallel_apply(
    modules: Sequence[Callable[..., Any]],
    inputs: Sequence[Any],
    kwargs: Sequence[dict[str, Any]] | None = None,
    devices: Iterable[Device | None] | None = None,
) -> list[Any]:
    """Call each module with its own arguments, all at the same time.

    Every call runs in the caller's grad mode, inference mode, autocast state, context variables,
    and current streams of accelerators.

    Args:
        modules: List of k modules, or other callables.
        inputs: Positional arguments of each module: a tuple, a list, or a single argument.
        kwargs: Keyword arguments of each module.
        devices: Current accelerator of each call; the device of its first tensor if None.

    Returns:
        A list of the k results.

    Raises:
        ArgumentError: The lengths of the arguments differ.
        NotSupportedError: There are several modules inside a `torch.func` transform.
        Exception: The exception of the first module that failed, the same object, with a note that
            names the replica, raised after all calls have ended.

    Example:
        >>> parallel_apply([torch.sin, torch.cos], [torch.zeros(1), torch.zeros(1)])
        [tensor([0.]), tensor([1.])]
    """
    named = [{} for _ in modules] if kwargs is None else list(kwargs)
    places = [None for _ in modules] if devices is None else list(devices)
    for name, entries in (("inputs", inputs), ("kwargs", named), ("devices", places)):
        if len(entries) != len(modules):
            raise ArgumentError(
                f"{name} has {len(entries)} entries, modules has {len(modules)}: give one for each"
            )
    if len(modules) > 1:
        refuse_in_transforms(f"parallel_apply of {len(modules)} modules")
    calls = [
        _Call(i, *call) for i, call in enumerate(zip(modules, inputs, named, places, strict=True))
    ]
    modes = _modes()
    threads = [
        threading.Thread(target=call.run, args=(modes,), kwargs={"in_thread": True})
        for call in calls[1:]
    ]
    for thread in threads:
        thread.start()
    if calls:
        calls[0].run(modes, False)
    for thread in threads:
        thread.join()
    try:
        return [call.outcome() for call in calls]
    finally:
        # An error's traceback refers to its call: drop the call's reference to avoid a cycle.
        for call in calls:
            call.error = None


@run_as_written  # compiled code would contain the answer from the time of compilation
def refuse_in_transforms(what: str) -> None:
    """Raise for several replicas inside a transform, which their threads would not inherit."""
    if torch._C._are_functorch_transforms_active():
        raise NotSupportedError(
            f"{what} inside torch.func transforms, which apply to one thread only: apply the "
            "transform inside the module, or compute gradients with backward()"
        )


class _Call:
    """Call of one module: its arguments, and its outcome."""

    def __init__(
        self,
        index: int,
        module: Callable[..., Any],
        given: Any,
        kwargs: dict[str, Any],
        device: Device | None,
    ) -> None:
        self.index, self.module, self.kwargs = index, module, kwargs
        self.args = given if isinstance(given, tuple | list) else (given,)
        if device is None:
            self.device = next((t.device for t in tensors_in((self.args, kwargs))), None)
        else:
            self.device = as_device(device, f"devices[{index}]")
        streamed = self.device is not None and has_streams(self.device)
        self.stream = torch.accelerator.current_stream(self.device) if streamed else None
        self.context = contextvars.copy_context()
        self.result: Any = None
        self.error: BaseException | None = None

    def run(self, modes: Modes, in_thread: bool) -> None:
        try:
            if in_thread and self.stream is not None and self.stream.device.type == "cuda":
                # makes a context current in the thread; otherwise cuBLAS warns
                torch.cuda.mem_get_info(self.stream.device)
            # entering the stream makes its device the current one
            with modes(), self.stream or contextlib.nullcontext():
                self.result = self.context.run(self.module, *self.args, **self.kwargs)
        except BaseException as error:
            self.error = error

    def outcome(self) -> Any:
        """Return the result, or raise the call's exception."""
        if self.error is None:
            return self.result
        what = f"Caught {type(self.error).__name__} in replica {self.index}"  # PyTorch's wording
        note = f"{what} on {self.device or 'no device'}"
        with contextlib.suppress(Exception):  # some classes reject notes; keep the original error
            if note not in getattr(self.error, "__notes__", []):
                self.error.add_note(note)
        raise self.error


def _modes() -> Modes:
    """Return a context manager that restores the current modes in any thread."""
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    cache = torch.is_autocast_cache_enabled()
    accelerator = torch.accelerator.current_accelerator()
    kinds = ["cpu"] if accelerator is None else ["cpu", accelerator.type]
    autocasts = [(k, torch.get_autocast_dtype(k)) for k in kinds if torch.is_autocast_enabled(k)]

    @contextlib.contextmanager
    def modes() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode(inference))
            stack.enter_context(torch.set_grad_enabled(grad))
            for kind, dtype in autocasts:
                stack.enter_context(torch.autocast(kind, dtype, cache_enabled=cache))
            yield

    return modes


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
            floating-point buffers, and keeps the first replica's other buffers. Assigning a buffer
            counts as writing it.

    Example:
        >>> model = DataParallel(torch.nn.Linear(3, 1), ["cpu"] * 2)
        >>> model(torch.zeros(5, 3)).shape  # the replicas see 3 rows and 2
        torch.Size([5, 1])

        Distribute a list of graphs of different sizes, instead of splitting a batch.

        >>> class Dealing(DataParallel):
        ...     def scatter(self, inputs, kwargs, devices):
        ...         parts = [inputs[0][i :: len(devices)] for i in range(len(devices))]
        ...         return [(part,) for part in parts if part], [kwargs for part in parts if part]
        >>> class Sizes(torch.nn.Module):
        ...     def forward(self, graphs):
        ...         return torch.tensor([len(graph) for graph in graphs])
        >>> Dealing(Sizes(), ["cpu"] * 2)([torch.zeros(1), torch.zeros(2), torch.zeros(3)])
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
    ) -> None:
        super().__init__()
        if buffers not in get_args(BufferPolicy):
            raise ArgumentError(f'buffers is {buffers!r}: give "first" or "mean"')
        if not isinstance(module, Module):
            raise ArgumentTypeError(f"module is a {type(module).__name__}: give a torch.nn.Module")
        if not isinstance(dim, int):
            raise ArgumentTypeError(f"dim is {dim!r}, a {type(dim).__name__}: give an int")
        self.module = module
        self.devices = default_devices() if devices is None else as_devices(devices)
        self.output_device = as_destination(output_device, self.devices[0], "output_device")
        self.dim = dim
        self.buffer_policy = buffers

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Return the module's outputs for the whole batch.

        Raises:
            ArgumentError: Inputs have different batch sizes, outputs have different structures, a
                parameter is not on the first device, or a buffer has no mean.
            NotSupportedError: There are several devices inside a `torch.func` transform.
            Exception: The exception that the module raised in the first replica that failed.
        """
        if len(self.devices) > 1:
            refuse_in_transforms(f"DataParallel on {len(self.devices)} devices")
        _check_home(self.module, self.devices[0])
        chunks, named = self.scatter(inputs, kwargs, self.devices)
        if not inputs and not kwargs:
            chunks, named = chunks[:1], named[:1]
        if len(self.devices) == 1 and self.output_device == self.devices[0]:
            return self.module(*chunks[0], **named[0])
        replicas = self.replicate(self.module, self.devices[: len(chunks)])
        tracker = _BufferTracker(self.module, self.buffer_policy, replicas[0])
        outputs = self.parallel_apply(replicas, chunks, named)
        tracker.apply_policy(self.module, replicas)
        return self.gather(outputs, self.output_device)

    def replicate(self, module: M, devices: Sequence[Device]) -> list[M]:
        """Return the replicas of one forward; subclasses may override this method."""
        return replicate(module, devices, not torch.is_grad_enabled())

    def scatter(
        self, inputs: tuple[Any, ...], kwargs: dict[str, Any], devices: Sequence[Device]
    ) -> tuple[Sequence[tuple[Any, ...]], Sequence[dict[str, Any]]]:
        """Return each replica's arguments, for one replica to all; subclasses may override this.

        Args:
            inputs: Positional arguments of the call.
            kwargs: Keyword arguments of the call.
            devices: Devices, the first of which the replicas are on.

        Returns:
            Two lists of one length, with a tuple of positional arguments and a dict of keyword
            arguments for each replica, moved to its device.
        """
        return scatter_kwargs(inputs, kwargs, devices, self.dim)

    def parallel_apply(
        self, replicas: Sequence[M], inputs: Sequence[Any], kwargs: Sequence[dict[str, Any]]
    ) -> list[Any]:
        """Return each replica's outputs; subclasses may override this method."""
        return parallel_apply(replicas, inputs, kwargs, self.devices[: len(replicas)])

    def gather(self, outputs: Sequence[Any], output_device: Device) -> Any:
        """Return the joined outputs; subclasses may override this method."""
        return gather_nested(outputs, output_device, self.dim)


def data_parallel(
    module: Module,
    inputs: Any,
    devices: Iterable[Device] | None = None,
    output_device: Device | None = None,
    dim: int = 0,
    module_kwargs: dict[str, Any] | None = None,
) -> Any:
    """Call a module once, as `DataParallel` does.

    Args:
        module: Module, whose parameters and buffers must be on the first of `devices`.
        inputs: Tuple of positional arguments, or a single argument; None for none.
        devices: List of devices; all accelerators if None, or the CPU if there are none.
        output_device: Device of the outputs; the first device if None.
        dim: Batch dim of all inputs and outputs.
        module_kwargs: Keyword arguments.

    Example:
        >>> data_parallel(torch.nn.Linear(3, 1), torch.zeros(5, 3), ["cpu"] * 2).shape
        torch.Size([5, 1])
    """
    arguments = inputs if isinstance(inputs, tuple) else (() if inputs is None else (inputs,))
    runner = DataParallel(module, devices, output_device, dim)
    return cast("Any", runner)(*arguments, **(module_kwargs or {}))
