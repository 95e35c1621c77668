"""Tensors whose values are held by others, or shared."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from gradwire.errors import ArgumentError


def inner_tensors(tensor: Tensor) -> list[Tensor]:
    """Return the tensors that hold a subclass's values, or the tensor itself."""
    if type(tensor) is Tensor or not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    held = [getattr(tensor, name) for name in names]
    return [inner for value in held if isinstance(value, Tensor) for inner in inner_tensors(value)]


def check_not_expanded(tensor: Tensor, name: str) -> None:
    """Raise if several of a tensor's elements share one element in memory.

    Raises:
        ArgumentError: The tensor is expanded.

    Example:
        >>> check_not_expanded(torch.ones(4), "x")
        >>> try:
        ...     check_not_expanded(torch.ones(1).expand(4), "x")
        ... except ArgumentError as error:
        ...     print(str(error).partition(":")[0])
        x, of shape (4,), is expanded
    """
    if tensor.layout != torch.strided:
        return
    if any(n > 1 and s == 0 for n, s in zip(tensor.shape, tensor.stride(), strict=True)):
        raise ArgumentError(
            f"{name}, of shape {tuple(tensor.shape)}, is expanded: several of its elements share "
            "one element in memory, and cannot be written separately; clone() it"
        )
