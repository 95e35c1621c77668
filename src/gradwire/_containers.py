"""Nested containers of tensors: one level flattened and rebuilt, leaves, and mapping.

All packages use this definition of a container: a tuple, list, dict, deque, `UserDict`, `UserList`,
other mapping, or a subclass of these; a dataclass; a `PackedSequence`; a type registered with
`register_container` or PyTorch's pytrees. All other objects are leaves.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

from torch import Size, Tensor
from torch.nn import Module
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

from gradwire.errors import ArgumentError, ArgumentTypeError

T = TypeVar("T")
Unflatten: TypeAlias = Callable[[Sequence[Any]], Any]

_BUILTIN = {tuple, list, dict, OrderedDict, defaultdict, deque}
"""Containers that are also registered with pytrees, which would not copy a deque's length."""


@dataclasses.dataclass(frozen=True)
class OneLevel:
    """Container, flattened by one level."""

    # Key of each child. Two containers match if their types and keys are equal. A range if children
    # are identified by position.
    keys: Sequence[Hashable]
    children: Sequence[Any]
    # Builds a container of the same type from other children.
    unflatten: Unflatten
    # Context of a pytree node whose children have no known keys. It may identify them.
    context: Any = None


_registered: dict[type, tuple[Callable[[Any], Sequence[Any]], Callable[[Any, Sequence[Any]], Any]]]
_registered = {}


def register_container(
    kind: type[T],
    children: Callable[[T], Sequence[Any]],
    build: Callable[[T, Sequence[Any]], T],
) -> None:
    """Register a type as a container, for all functions that take nested containers.

    These are the coalesced collectives, DistributedDataParallel, and DataParallel and the nested
    functions of `devices`.

    Args:
        kind: Type; subclasses are not registered implicitly.
        children: Function that returns an object's children, in the same order on every rank.
        build: Function that returns a new object, given an original and new children in the same
            order. It must not modify the original.

    Raises:
        ArgumentError: The type is already registered.

    Example:
        >>> class Pair:
        ...     def __init__(self, left, right):
        ...         self.left, self.right = left, right
        >>> register_container(Pair, lambda p: (p.left, p.right), lambda p, new: Pair(*new))
    """
    if kind in _registered:
        raise ArgumentError(f"kind is {kind.__name__}, which is already registered")
    _registered[kind] = (children, build)


def leaves(value: Any) -> Iterator[Any]:
    """Yield the leaves of nested containers."""
    flattened = None if isinstance(value, Tensor) else flatten_one_level(value)
    if flattened is None:
        yield value
    else:
        for child in flattened.children:
            yield from leaves(child)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested containers."""
    return (leaf for leaf in leaves(value) if isinstance(leaf, Tensor))


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Apply a function to the tensors in nested containers."""
    if isinstance(value, Tensor):
        return function(value)
    flattened = flatten_one_level(value)
    if flattened is None:
        return value
    # Containers in which a tensor changes are rebuilt. All other containers and leaves remain the
    # same objects.
    new = [map_tensors(function, child) for child in flattened.children]
    if all(a is b for a, b in zip(new, flattened.children, strict=True)):
        return value
    return flattened.unflatten(new)


def flatten_one_level(value: Any) -> OneLevel | None:
    """Flatten a container by one level; None for a leaf."""
    kind = type(value)
    if kind is tuple or kind is list:
        return OneLevel(range(len(value)), value, kind)
    if isinstance(value, Tensor | Size | Module | type):
        return None
    if kind in _registered:
        children_of, build = _registered[kind]
        children = children_of(value)
        return OneLevel(_keys(value, children), children, lambda new: build(value, new))
    if kind in pytree.SUPPORTED_NODES and kind not in _BUILTIN:
        return _flatten_pytree(value)
    if isinstance(value, PackedSequence):
        return OneLevel(("data",), [value.data], lambda new: _packed(value, *new))
    if kind in _BUILTIN:
        return _flatten_builtin(value)
    if isinstance(value, Mapping):
        keys, children = tuple(value), list(value.values())
        return OneLevel(keys, children, lambda new: _mapping(value, keys, children, new))
    if isinstance(value, list | tuple | deque | UserList):
        names = getattr(value, "_fields", None) if isinstance(value, tuple) else None
        children = list(value)
        return OneLevel(
            names or range(len(children)), children, lambda new: _sequence(value, children, new)
        )
    if dataclasses.is_dataclass(value):
        names = [f.name for f in dataclasses.fields(value) if hasattr(value, f.name)]
        return _flatten_attributes(value, names)
    return None


def _flatten_builtin(value: Any) -> OneLevel:
    """Flatten a container of the standard library, with an `unflatten` that Dynamo can trace."""
    if isinstance(value, deque):
        return OneLevel(range(len(value)), list(value), lambda new: deque(new, value.maxlen))
    keys, children = tuple(value), list(value.values())
    if isinstance(value, defaultdict):
        factory = value.default_factory
        return OneLevel(
            keys, children, lambda new: defaultdict(factory, zip(keys, new, strict=True))
        )
    kind = type(value)
    return OneLevel(keys, children, lambda new: kind(zip(keys, new, strict=True)))


# --- pytrees and dataclasses ---


def _flatten_pytree(value: Any) -> OneLevel:
    """Flatten with the functions that were registered with PyTorch's pytrees."""
    node = pytree.SUPPORTED_NODES[type(value)]
    children, context = node.flatten_fn(value)
    children = list(children)
    keys: Sequence[Hashable] = _keys(value, children, context)
    if node.flatten_with_keys_fn is not None:
        pairs, _ = node.flatten_with_keys_fn(value)
        named = [_key_of(entry) for entry, _ in pairs]
        keys = tuple(named) if _are_keys(named, len(children)) else keys
        if dataclasses.is_dataclass(value) and all(
            isinstance(entry, pytree.GetAttrKey) for entry, _ in pairs
        ):
            return _flatten_attributes(value, named)  # a copy keeps fields that pytrees drop
    return OneLevel(
        keys,
        children,
        lambda new: node.unflatten_fn(list(new), context),
        context if isinstance(keys, range) and len(children) > 1 else None,
    )


def _key_of(entry: Any) -> Any:
    """Return the key in an entry of a pytree's path."""
    for name in ("key", "name", "idx"):
        if hasattr(entry, name):
            return getattr(entry, name)
    return entry


def _keys(value: Any, children: Sequence[Any], context: Any = None) -> Sequence[Hashable]:
    """Return the keys of a registered type's children, or a range if they are unknown."""
    if isinstance(context, list | tuple) and _are_keys(context, len(children)):
        return tuple(context)
    if isinstance(value, Mapping) and [*map(id, value.values())] == [*map(id, children)]:
        return tuple(value)
    return range(len(children))


def _are_keys(found: Sequence[Any], count: int) -> bool:
    """Return True if there is one hashable key for each child, without duplicates."""
    try:
        return len(found) == count == len(set(found))
    except TypeError:
        return False


def _flatten_attributes(value: Any, names: Sequence[str]) -> OneLevel:
    children = [getattr(value, name) for name in names]

    def unflatten(new: Sequence[Any]) -> Any:
        result = copy.copy(value)
        _move_attributes(result, children, new)
        for name, child in zip(names, new, strict=True):
            object.__setattr__(result, name, child)  # works for frozen dataclasses
        return result

    return OneLevel(tuple(names), children, unflatten)


# --- rebuilding containers with other children ---


def _packed(value: PackedSequence, data: Tensor) -> PackedSequence:
    """Return the sequence with other data; batch sizes stay on the CPU."""
    indices = [
        None if i is None else i.to(data.device)
        for i in (value.sorted_indices, value.unsorted_indices)
    ]
    return type(value)(data, value.batch_sizes, *indices)


def _sequence(value: Any, children: Sequence[Any], new: Sequence[Any]) -> Any:
    """Return a list, tuple or deque of the same type and attributes with other entries."""
    result: Any
    if isinstance(value, tuple):
        try:
            result = tuple.__new__(type(value), new)  # bypasses a subclass's constructor
        except TypeError:  # a type written in C
            return type(value)(new)
        if hasattr(value, "__dict__"):
            vars(result).update(vars(value))
    else:
        result = copy.copy(value)
        if isinstance(value, deque):
            result.clear()
            result.extend(new)
        else:
            result[:] = new
    _move_attributes(result, children, new)
    return result


def _mapping(value: Any, keys: Sequence[Any], children: Sequence[Any], new: Sequence[Any]) -> Any:
    """Return a mapping of the same type and attributes with other values."""
    items = dict(zip(keys, new, strict=True))
    # Subclasses may reject some methods, store entries as attributes too, or have a constructor
    # with other parameters. Several ways are therefore tried, and the result is verified.
    ways: tuple[Callable[[Any, dict[Any, Any]], Any], ...] = (_copy_and_set, _new_and_update)
    if not isinstance(value, dict | UserDict):
        ways = (lambda value, items: type(value)(items), _copy_and_set)
    for way in ways:
        try:
            result = way(value, items)
            _move_attributes(result, children, new)
            if type(result) is type(value) and _holds(result, items):
                return result
        except Exception:
            continue
    if all(a is b for a, b in zip(children, new, strict=True)):
        return value
    raise ArgumentTypeError(
        f"a {type(value).__name__} cannot be rebuilt with other values: register the type with "
        "gradwire.devices.register_container"
    )


def _holds(mapping: Any, items: dict[Any, Any]) -> bool:
    """Return True if a mapping has the expected keys and tensors."""
    return list(mapping) == list(items) and all(
        mapping[key] is item for key, item in items.items() if isinstance(item, Tensor)
    )


def _copy_and_set(value: Any, items: dict[Any, Any]) -> Any:
    """Copy a mapping and set its items; keeps attributes such as a defaultdict's factory."""
    result = copy.copy(value)
    if not isinstance(value, dict | UserDict):
        if not hasattr(result, "__dict__"):
            raise ArgumentTypeError("a copy may share its storage with the original")
        for name, part in vars(result).items():
            if isinstance(part, dict | list):
                vars(result)[name] = copy.copy(part)
    elif getattr(value, "__dict__", None) is value:  # attributes are items
        result.__dict__ = result
    for key, item in items.items():
        result[key] = item  # not update(), which Counter overrides and other types reject
    return result


def _new_and_update(value: Any, items: dict[Any, Any]) -> Any:
    """Build a dict subclass without calling its methods, which may reject setting items."""
    kind: Any = type(value)
    result = kind.__new__(kind)
    attributes = getattr(value, "__dict__", None)
    if attributes is not None:
        result.__dict__ = result if attributes is value else dict(attributes)
    base = OrderedDict if isinstance(value, OrderedDict) else dict
    for key, item in items.items():
        base.__setitem__(result, key, item)
    return result


def _move_attributes(result: Any, children: Sequence[Any], new: Sequence[Any]) -> None:
    """Replace attributes that are children by the new children."""
    attributes = getattr(result, "__dict__", None)
    if not attributes or attributes is result:
        return
    moved = {id(a): b for a, b in zip(children, new, strict=True) if isinstance(a, Tensor)}
    for name, attribute in attributes.items():
        if id(attribute) in moved:
            attributes[name] = moved[id(attribute)]
