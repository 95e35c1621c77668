"""The tensors in what goes into a module, and in what comes out of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

__all__ = ["map_tensors", "tensors_in"]


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Tensors in tuples, lists, dicts and dataclasses, nested as they may be.

    Example:
        >>> list(tensors_in({"a": (torch.tensor(1), [2, torch.tensor(3)])}))
        [tensor(1), tensor(3)]
    """
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for v in value.values():
            yield from tensors_in(v)
    elif isinstance(value, list | tuple):
        for v in value:
            yield from tensors_in(v)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from tensors_in(getattr(value, field.name))


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """The value with a function applied to the tensors in its tuples, lists and dicts.

    Example:
        >>> map_tensors(lambda t: t + 1, (torch.tensor(1), {"a": [torch.tensor(2)]}))
        (tensor(2), {'a': [tensor(3)]})
    """
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, dict):
        return type(value)((k, map_tensors(function, v)) for k, v in value.items())
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(function, v) for v in value))
    if isinstance(value, list | tuple):
        return type(value)(map_tensors(function, v) for v in value)
    return value
