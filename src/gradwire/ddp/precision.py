"""Mixed precision: parameters and inputs are cast before the forward.

While the module runs, casts replace its parameters. Autograd differentiates the casts, so that
gradients accumulate in the parameters' original precision. Recomputation by checkpoints during
backward casts again. Reduction in a smaller dtype is a wrapper around the communication hook.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils.parametrize import ParametrizationList
from torch.nn.utils.spectral_norm import SpectralNorm

from gradwire._containers import map_tensors, tensors_in
from gradwire.ddp.hook_handles import WeakHook, remove_hooks_with
from gradwire.errors import ArgumentError, ArgumentTypeError
from gradwire.hooks import CommHook, all_reduce, compress


@dataclass(frozen=True)
class MixedPrecision:
    """Floating-point dtypes in which a module computes and communicates.

    Tensors of integer and other dtypes are not cast. None keeps the original dtype.

    Attributes:
        param_dtype: Dtype of parameters and inputs during forward and backward.
        reduce_dtype: Dtype of gradients in communication; None for `param_dtype`.
        buffer_dtype: Dtype of buffers, from construction on.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None


def resolve_precision(given: Any) -> MixedPrecision | None:
    """Return the configuration, converted if it is PyTorch's class with the same fields.

    Raises:
        ArgumentTypeError: `given` has other fields.
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
            raise ArgumentError(f"mixed_precision's {name} is {dtype}: pass a floating-point dtype")
    return MixedPrecision(**dtypes)


class Precision:
    """Applies a configuration to a module.

    Args:
        module: Module, whose floating-point buffers are cast at construction.
        config: Dtypes.
        ignored: Names of parameters and buffers that are not cast.
    """

    def __init__(self, module: nn.Module, config: MixedPrecision, ignored: Collection[str]) -> None:
        self._module, self._config = module, config
        self._kept = {id(t) for n, t in module.named_parameters() if n in ignored}
        self._cast_outputs: set[int] = set()  # ids of modules that compute in full precision
        self._derived: dict[int, list[str]] = {}  # attributes computed by hook-based spectral norms
        # attributes of modules that hold parameters, such as the _flat_weights of RNNs
        self._holders = {
            id(child): [
                n for n, v in vars(child).items() if n != "_parameters" and _holds_parameters(v)
            ]
            for child in module.modules()
        }
        self._active = False
        if config.buffer_dtype is not None:
            self._cast_buffers(config.buffer_dtype, ignored)
        if config.param_dtype is not None:
            self._keep_in_full_precision()
            handles = []
            before, after = map(WeakHook, (self._before_child, self._after_child))
            for child in module.modules():
                handles.append(child.register_forward_pre_hook(before))
                handles.append(child.register_forward_hook(after, always_call=True))
            remove_hooks_with(self, handles)
        self._recomputing: list[tuple[nn.Module, ExitStack]] = []

    def _keep_in_full_precision(self) -> None:
        """Find modules that cannot compute with cast parameters, and keep their parameters.

        Their outputs are cast instead: buffers of parametrizations have the parameters' dtype, and
        a cast has no sparse gradient. Batch norms accept inputs of another dtype.
        """
        for child in self._module.modules():
            inside = isinstance(child, ParametrizationList)
            if inside or (isinstance(child, nn.Embedding | nn.EmbeddingBag) and child.sparse):
                self._cast_outputs.add(id(child))
                self._kept.update(id(p) for p in child.parameters())
            if isinstance(child, _NormBase) and self._has_other_statistics(child):
                self._kept.update(id(p) for p in child.parameters())
            for hook in child._forward_pre_hooks.values():
                if isinstance(hook, SpectralNorm):
                    self._derived.setdefault(id(child), []).append(hook.name)
                    self._kept.add(id(getattr(child, f"{hook.name}_orig")))

    def _has_other_statistics(self, norm: _NormBase) -> bool:
        mean = norm.running_mean
        return mean is not None and mean.dtype != self._config.param_dtype

    def _cast_buffers(self, dtype: torch.dtype, ignored: Collection[str]) -> None:
        for name, child in self._module.named_modules():
            for key, buffer in child._buffers.items():
                full = f"{name}.{key}" if name else key
                if buffer is not None and buffer.is_floating_point() and full not in ignored:
                    child._buffers[key] = buffer.to(dtype)

    def hook(self, hook: CommHook | None) -> CommHook | None:
        """Return a communication hook in the dtype for reduction."""
        dtype = self._config.reduce_dtype or self._config.param_dtype
        return hook if dtype is None else compress(hook or all_reduce, dtype)

    def inputs(self, value: Any) -> Any:
        """Return the inputs, cast to the module's dtype."""
        return value if self._config.param_dtype is None else map_tensors(self._cast, value)

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Run the module with cast parameters in this context."""
        with self._swapped(self._module):
            self._active = True
            try:
                yield
            finally:
                self._active = False

    @contextmanager
    def _swapped(self, module: nn.Module) -> Iterator[None]:
        """Replace the parameters of a module and its children by casts in this context."""
        undo: list[tuple[dict[str, Any], str, Any]] = []
        casts: dict[int, Tensor] = {}

        def cast(parameter: Tensor) -> Tensor:
            if id(parameter) not in casts:
                casts[id(parameter)] = self._cast(parameter)
            return casts[id(parameter)]

        def cast_held(t: Tensor) -> Tensor:
            return cast(t) if isinstance(t, nn.Parameter) and id(t) not in self._kept else t

        for child in module.modules() if self._config.param_dtype is not None else ():
            for name, parameter in child._parameters.items():
                if parameter is not None and id(parameter) not in self._kept:
                    undo.append((child._parameters, name, parameter))
                    child._parameters[name] = cast(parameter)  # type: ignore[assignment]
            for name in self._holders.get(id(child), ()):
                if (held := vars(child).get(name)) is not None:
                    undo.append((vars(child), name, held))
                    vars(child)[name] = map_tensors(cast_held, held)
        try:
            yield
        finally:
            for own, name, tensor in undo:
                own[name] = tensor

    def _cast(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._config.param_dtype) if tensor.is_floating_point() else tensor

    def _before_child(self, module: nn.Module, *_: Any) -> None:
        in_backward = torch._C._current_graph_task_id() != -1
        if in_backward and not self._active and not self._recomputing:
            stack = ExitStack()
            stack.enter_context(self._swapped(module))
            self._recomputing.append((module, stack))
        if self._active or self._recomputing:
            for name in self._derived.get(id(module), ()):
                setattr(module, name, self._cast(getattr(module, name)))

    def _after_child(self, module: nn.Module, _: Any, output: Any) -> Any:
        """Return the cast output; None if the output is not cast."""
        casts = id(module) in self._cast_outputs and (self._active or bool(self._recomputing))
        if self._recomputing and self._recomputing[-1][0] is module:
            self._recomputing.pop()[1].close()
        return map_tensors(self._cast, output) if casts else None


def _holds_parameters(value: Any) -> bool:
    """Return True for lists, tuples and dicts that contain parameters."""
    held = isinstance(value, list | tuple | dict)
    return held and any(isinstance(t, nn.Parameter) for t in tensors_in(value))
