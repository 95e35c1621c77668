"""Replicas of a module, and policies for the buffers that they write.

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
from gradwire.devices.copying import local
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
            names the replica, raised after all calls have ended. Python 3.10 keeps notes in
            `__notes__`, but does not show them.

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
    threads = [threading.Thread(target=call.run_in_thread, args=(modes,)) for call in calls[1:]]
    for thread in threads:
        thread.start()
    if calls:
        calls[0].run(modes)
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
    """Raise for several replicas inside a transform, which their threads would not inherit.

    Raises:
        NotSupportedError: A `torch.func` transform is active.
    """
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
        found = _first_device((self.args, kwargs))
        self.device = found if device is None else as_device(device, f"devices[{index}]")
        self.stream = _current_stream(self.device)
        self.context = contextvars.copy_context()
        self.result: Any = None
        self.error: BaseException | None = None

    def run(self, modes: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
        try:
            with modes(), self.stream or contextlib.nullcontext():
                self.result = self.context.run(self.module, *self.args, **self.kwargs)
        except BaseException as error:
            self.error = error

    def run_in_thread(self, modes: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
        try:
            if self.stream is not None and self.stream.device.type == "cuda":
                # makes a context current in the thread; otherwise cuBLAS warns
                torch.cuda.mem_get_info(self.stream.device)
        except Exception as error:
            self.error = error
            return
        self.run(modes)

    def outcome(self) -> Any:
        """Return the result, or raise the call's exception."""
        if self.error is None:
            return self.result
        what = f"Caught {type(self.error).__name__} in replica {self.index}"  # PyTorch's wording
        _add_note(self.error, f"{what} on {self.device or 'no device'}")
        raise self.error


def _add_note(error: BaseException, note: str) -> None:
    """Add a note as `add_note` of Python 3.11 does, unless the error already has it."""
    with contextlib.suppress(Exception):  # some classes reject attributes; keep the original error
        notes = getattr(error, "__notes__", [])
        if note not in notes:
            error.__notes__ = [*notes, note]


def _first_device(value: Any) -> torch.device | None:
    """Return the device of the first tensor in a container."""
    return next((tensor.device for tensor in tensors_in(value)), None)


def _current_stream(device: torch.device | None) -> torch.Stream | None:
    """Return the stream in which to run a call; entering it makes its device the current one."""
    if device is None or device.type not in ("cuda", "xpu"):
        return None
    return torch.accelerator.current_stream(device)


def _modes() -> Callable[[], contextlib.AbstractContextManager[None]]:
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
