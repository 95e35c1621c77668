"""Parallel calls of replicas, each in its own thread, in the caller's modes."""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from gradwire._containers import tensors_in
from gradwire._torch import run_as_written
from gradwire.devices.placement import Device, as_device
from gradwire.errors import ArgumentError, NotSupportedError


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
