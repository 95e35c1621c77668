"""Run the package's own work outside the caller's contexts.

A forward may be called inside a transform of `torch.func`, in inference mode, under autocast or
with a default device. Backward calls its hooks in the context in which it was started. Buffers,
messages and reference counts belong to the whole training and must not depend on that context.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import torch
from torch._C import _functorch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from gradwire._torch import run_as_written

Function = TypeVar("Function", bound=Callable[..., Any])


def in_transform() -> bool:
    """Return True inside a transform of `torch.func`, such as `grad` or `vmap`."""
    return _functorch.peek_interpreter_stack() is not None


@contextmanager
def outside_contexts() -> Iterator[None]:
    """Leave transforms, inference mode, autocast, the default device and `__torch_function__`."""
    # Grad mode is unchanged. The modes of `__torch_dispatch__` stay active because tensor
    # subclasses need them.
    with ExitStack() as stack:
        if in_transform():
            stack.enter_context(temporarily_clear_interpreter_stack())
        if torch.is_inference_mode_enabled():
            enabled = torch.is_grad_enabled()
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.set_grad_enabled(enabled))  # the line above enables them
        if torch._C._is_any_autocast_enabled():
            for device in {"cpu", *_accelerators()}:
                stack.enter_context(torch.autocast(device, enabled=False))
        if torch._C._len_torch_function_stack():
            stack.enter_context(torch._C.DisableTorchFunction())
        yield


def _accelerators() -> list[str]:
    accelerator = torch.accelerator.current_accelerator()
    return [] if accelerator is None else [accelerator.type]


def runs_outside_contexts(function: Function) -> Function:
    """Decorate a function to run in `outside_contexts` and to be skipped by torch.compile."""
    # local names: the check takes 0.2 µs, several times in each step; entering the contexts 20 µs
    in_interpreter, in_inference = (
        _functorch.peek_interpreter_stack,
        torch.is_inference_mode_enabled,
    )
    in_autocast, overrides = torch._C._is_any_autocast_enabled, torch._C._len_torch_function_stack

    @functools.wraps(function)
    def called_outside(*args: Any, **kwargs: Any) -> Any:
        if in_interpreter() is None and not (in_inference() or in_autocast() or overrides()):
            return function(*args, **kwargs)
        with outside_contexts():
            return function(*args, **kwargs)

    return run_as_written(called_outside)  # type: ignore[return-value]
