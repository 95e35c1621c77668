"""Runs each replica in a thread of its own, in the caller's modes."""

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

    Every call runs in the caller's modes: grad and inference mode, autocast with its dtypes, the
    context variables, and each accelerator's current stream.

    Args:
        modules: k modules, or other callables.
        inputs: For each module, the tuple or list of its positional arguments, or its only one.
        kwargs: For each module, its named arguments.
        devices: For each module, the accelerator that is current while it runs; that of its first
            tensor if None.

    Returns:
        The k results.

    Raises:
        ArgumentError: Lengths that differ.
        NotSupportedError: Several modules inside torch.func's transforms.
        Exception: What the first module that failed raised, the same object, with a note that says
            which replica it was; Python 3.10 keeps notes in `__notes__`, but does not show them.
            All calls have ended by then.

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
    threads = [threading.Thread(target=call.run, args=(modes,)) for call in calls[1:]]
    for thread in threads:
        thread.start()
    if calls:
        calls[0].run(modes)
    for thread in threads:
        thread.join()
    try:
        return [call.outcome() for call in calls]
    finally:
        # An error's traceback refers to its call: a call that refers to the error is a cycle.
        for call in calls:
            call.error = None


@run_as_written  # else compiled code has the answer of when it was compiled
def refuse_in_transforms(what: str) -> None:
    """Raise for several replicas inside a transform, which the threads that run them do not have.

    Raises:
        NotSupportedError: Within torch.func's transforms.
    """
    if torch._C._are_functorch_transforms_active():
        raise NotSupportedError(
            f"{what} inside torch.func transforms, which hold in one thread: apply the transform "
            "inside the module, or take gradients with backward()"
        )


class _Call:
    """One module's call: what it is given, and what came of it."""

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

    def outcome(self) -> Any:
        """The result; raises what the call raised."""
        if self.error is None:
            return self.result
        what = f"Caught {type(self.error).__name__} in replica {self.index}"  # PyTorch's phrase
        _add_note(self.error, f"{what} on {self.device or 'no device'}")
        raise self.error


def _add_note(error: BaseException, note: str) -> None:
    """What Python 3.11's `add_note` does, once for an error that is raised again and again."""
    with contextlib.suppress(Exception):  # a class may refuse notes; its error is what matters
        notes = getattr(error, "__notes__", [])
        if note not in notes:
            error.__notes__ = [*notes, note]


def _first_device(value: Any) -> torch.device | None:
    """Return the device of the first tensor in a container."""
    return next((tensor.device for tensor in tensors_in(value)), None)


def _current_stream(device: torch.device | None) -> torch.Stream | None:
    """The stream in which a call is to run; entering it makes its device the current one."""
    if device is None or device.type not in ("cuda", "xpu"):
        return None
    return torch.accelerator.current_stream(device)


def _modes() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Makes a context that has, in any thread, the modes that hold here and now."""
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
