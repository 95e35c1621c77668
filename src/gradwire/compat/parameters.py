"""Which parameters and buffers of a module PyTorch's class leaves out, marked before wrapping."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn
from torch.nn import Parameter

__all__ = ["data_parallel_parameters", "ignore_for_model"]


def ignore_for_model(module: nn.Module, params_and_buffers_to_ignore: Sequence[str]) -> None:
    """Leave out the parameters and buffers of these names, in a module yet to be wrapped."""
    module._ddp_params_and_buffers_to_ignore = params_and_buffers_to_ignore  # type: ignore[assignment]
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if name in params_and_buffers_to_ignore:
            tensor._ddp_ignored = True  # type: ignore[attr-defined]


def data_parallel_parameters(
    module: nn.Module, named_params: bool = False
) -> Iterator[Parameter | tuple[str, Parameter]]:
    """The parameters that are not left out, or names and parameters."""
    for name, parameter in module.named_parameters():
        if not hasattr(parameter, "_ddp_ignored"):
            yield (name, parameter) if named_params else parameter
