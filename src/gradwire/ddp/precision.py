"""Mixed precision: parameters and inputs are cast on the way into the forward.

While the module runs, its parameters are replaced by casts of themselves, which autograd follows
back: gradients accumulate in the parameters' own precision. What checkpointing computes again
during backward is cast again. Reduction in a smaller dtype is a wrapper around the hook.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gradwire._containers import map_tensors
from gradwire.ddp.hook_handles import WeakHook, remove_hooks_with
from gradwire.errors import ArgumentError, ArgumentTypeError
from gradwire.hooks import CommHook, all_reduce, compress

__all__ = ["MixedPrecision", "Precision", "resolve_precision"]


@dataclass(frozen=True)
class MixedPrecision:
    """In which floating-point types a module computes and communicates.

    Integers and buffers of other kinds are left alone; None leaves that part as it is.

    Attributes:
        param_dtype: Of parameters and inputs in forward and backward. Outside they keep their own.
        reduce_dtype: Of gradients on their way; None: `param_dtype`.
        buffer_dtype: Of buffers, from construction on.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None


def resolve_precision(given: Any) -> MixedPrecision | None:
    """Our configuration, from ours or from torch's of the same fields.

    Raises:
        ArgumentTypeError: Neither.
        ArgumentError: A dtype is not floating-point.
    """
    if given is None:
        return None
    names = ("param_dtype", "reduce_dtype", "buffer_dtype")
    if not all(hasattr(given, name) for name in names):
        raise ArgumentTypeError(
            f"mixed_precision is {given!r}: pass gradwire.ddp.MixedPrecision(param_dtype=…)"
        )
    dtypes = {name: getattr(given, name) for name in names}
    for name, dtype in dtypes.items():
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ArgumentError(f"mixed_precision's {name} is {dtype}: give a floating-point dtype")
    return MixedPrecision(**dtypes)


class Precision:
    """Applies a configuration to a module.

    Args:
        module: The module; its floating-point buffers are cast at once.
        config: The dtypes.
        ignored: Names of parameters and buffers that are left alone.
    """

    def __init__(self, module: nn.Module, config: MixedPrecision, ignored: Collection[str]) -> None:
        self._module, self._config = module, config
        self._kept = {id(t) for n, t in module.named_parameters() if n in ignored}
        self._active = False
        if config.buffer_dtype is not None:
            self._cast_buffers(config.buffer_dtype, ignored)
        if config.param_dtype is not None:
            handles = []
            before, after = map(WeakHook, (self._before_recomputation, self._after_recomputation))
            for child in module.modules():
                handles.append(child.register_forward_pre_hook(before))
                handles.append(child.register_forward_hook(after, always_call=True))
            remove_hooks_with(self, handles)
        self._recomputing: list[tuple[nn.Module, ExitStack]] = []

    def _cast_buffers(self, dtype: torch.dtype, ignored: Collection[str]) -> None:
        for name, child in self._module.named_modules():
            for key, buffer in child._buffers.items():
                full = f"{name}.{key}" if name else key
                if buffer is not None and buffer.is_floating_point() and full not in ignored:
                    child._buffers[key] = buffer.to(dtype)

    def hook(self, hook: CommHook | None) -> CommHook | None:
        """A hook that communicates in the dtype for reduction."""
        dtype = self._config.reduce_dtype or self._config.param_dtype
        return hook if dtype is None else compress(hook or all_reduce, dtype)

    def inputs(self, value: Any) -> Any:
        """Inputs as the module takes them."""
        dtype = self._config.param_dtype
        if dtype is None:
            return value
        return map_tensors(lambda t: t.to(dtype) if t.is_floating_point() else t, value)

    @contextmanager
    def forward(self) -> Iterator[None]:
        """While the module runs."""
        with self._swapped(self._module):
            self._active = True
            try:
                yield
            finally:
                self._active = False

    @contextmanager
    def _swapped(self, module: nn.Module) -> Iterator[None]:
        """Casts stand in for the parameters of a module and its children."""
        dtype = self._config.param_dtype
        undo: list[tuple[dict[str, Any], str, Tensor]] = []
        casts: dict[int, Tensor] = {}
        for child in module.modules() if dtype is not None else ():
            for name, parameter in child._parameters.items():
                if parameter is None or id(parameter) in self._kept:
                    continue
                if parameter.is_floating_point() and parameter.dtype != dtype:
                    if id(parameter) not in casts:
                        casts[id(parameter)] = parameter.to(dtype)
                    undo.append((child._parameters, name, parameter))
                    child._parameters[name] = casts[id(parameter)]  # type: ignore[assignment]
        try:
            yield
        finally:
            for own, name, tensor in undo:
                own[name] = tensor

    def _before_recomputation(self, module: nn.Module, *_: Any) -> None:
        in_backward = torch._C._current_graph_task_id() != -1
        if in_backward and not self._active and not self._recomputing:
            stack = ExitStack()
            stack.enter_context(self._swapped(module))
            self._recomputing.append((module, stack))

    def _after_recomputation(self, module: nn.Module, *_: Any) -> None:
        if self._recomputing and self._recomputing[-1][0] is module:
            self._recomputing.pop()[1].close()
