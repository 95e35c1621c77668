"""Flattens nested containers and builds them again: what DataParallel's inputs and outputs are.

A container is a tuple, list, dict or one of their subclasses, a dataclass, a type registered here,
or one registered with torch's pytrees. Everything else is a leaf.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeAlias, TypeVar, cast

import torch
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

from gradwire.errors import ArgumentError, NotSupportedError

__all__ = ["OneLevel", "flatten_one_level", "register_container"]

T = TypeVar("T")
Unflatten: TypeAlias = Callable[[Sequence[Any]], Any]


@dataclasses.dataclass(frozen=True)
class OneLevel:
    """A container, flattened by one level.

    Attributes:
        keys: Of the children; two containers match if their types and keys are equal.
        children: What it holds.
        unflatten: Makes a container of the same type from other children.
    """

    keys: tuple[Hashable, ...]
    children: list[Any]
    unflatten: Unflatten


_registered: dict[type, tuple[Callable[[Any], Sequence[Any]], Callable[[Any, Sequence[Any]], Any]]]
_registered = {}


def register_container(
    kind: type[T],
    children: Callable[[T], Sequence[Any]],
    build: Callable[[T, Sequence[Any]], T],
) -> None:
    """Let scatter_nested, gather_nested and DataParallel look into a type.

    Args:
        kind: The type; subclasses need a registration of their own.
        children: Gives an object's children.
        build: Makes an object from a model and new children in the same order. The model is not
            changed.

    Raises:
        ArgumentError: The type is registered already.

    Example:
        >>> class Pair:
        ...     def __init__(self, left, right):
        ...         self.left, self.right = left, right
        >>> register_container(Pair, lambda p: (p.left, p.right), lambda p, new: Pair(*new))
    """
    if kind in _registered:
        raise ArgumentError(f"kind is {kind.__name__}, which is registered already")
    _registered[kind] = (children, build)


def flatten_one_level(value: Any) -> OneLevel | None:
    """The container, flattened by one level; None for a leaf."""
    if isinstance(value, torch.Tensor | torch.Size | torch.nn.Module | type):
        return None
    if type(value) in _registered:
        children_of, build = _registered[type(value)]
        return _numbered(children_of(value), lambda new: build(value, new))
    if isinstance(value, PackedSequence):
        raise NotSupportedError(
            "a PackedSequence cannot be cut along the batch: pad it, and pack inside the module"
        )
    if isinstance(value, dict):
        return _flatten_dict(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return OneLevel(value._fields, list(value), cast("Any", type(value))._make)
    if isinstance(value, list) and type(value) is not list:
        return _numbered(value, functools.partial(_copy_with, value))
    if isinstance(value, tuple | list):
        return _numbered(value, type(value))
    if dataclasses.is_dataclass(value):
        return _flatten_dataclass(value)
    if type(value) in pytree.SUPPORTED_NODES:
        return _flatten_pytree(value)
    return None


def _copy_with(model: list[Any], new: Sequence[Any]) -> list[Any]:
    """A copy of a list's subclass with other entries, and with all its other attributes."""
    result = copy.copy(model)
    result[:] = new
    return result


def _numbered(children: Sequence[Any], unflatten: Unflatten) -> OneLevel:
    """A container whose keys are numbers."""
    return OneLevel(tuple(range(len(children))), list(children), unflatten)


def _flatten_dict(value: dict[Any, Any]) -> OneLevel:
    keys = tuple(value)

    def unflatten(new: Sequence[Any]) -> dict[Any, Any]:
        # A copy keeps a subclass's own attributes, as a defaultdict its default.
        result = copy.copy(value)
        for key, child in zip(keys, new, strict=True):
            result[key] = child  # a subclass's update may count, as Counter's does, or be refused
        return result

    return OneLevel(keys, list(value.values()), unflatten)


def _flatten_dataclass(value: Any) -> OneLevel:
    names = tuple(field.name for field in dataclasses.fields(value))

    def unflatten(new: Sequence[Any]) -> Any:
        result = copy.copy(value)
        for name, child in zip(names, new, strict=True):
            object.__setattr__(result, name, child)  # a frozen one, too
        return result

    return OneLevel(names, [getattr(value, name) for name in names], unflatten)


def _flatten_pytree(value: Any) -> OneLevel:
    node = pytree.SUPPORTED_NODES[type(value)]
    children, context = node.flatten_fn(value)
    return _numbered(children, lambda new: node.unflatten_fn(new, context))
