"""Drawn containers of every kind around a tree, and the plain tree inside."""

from __future__ import annotations

import random
from collections import OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch.utils import _pytree


class Sub(dict[Any, Any]):
    pass


class Configured(dict[Any, Any]):
    """Has a constructor of its own, and one entry as an attribute."""

    def __init__(self, config: str, first: Any) -> None:
        super().__init__()
        self.config, self.first = config, first


class Refusing(dict[Any, Any]):
    def __setitem__(self, key: Any, value: Any) -> None:
        raise TypeError("refused")


class ByContext(dict[Any, Any]):
    """Registered with its keys as the context."""


class ByPaths(dict[Any, Any]):
    """Registered with the paths of its values."""


class Stored(UserDict[Any, Any]):
    def __init__(self, config: str) -> None:
        super().__init__()
        self.config = config


@dataclass(frozen=True)
class Holder:
    held: Any


class Counted(list[Any]):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.total = count


class Marked(tuple[Any, ...]):
    def __new__(cls, mark: str, entries: Any) -> Marked:
        made = super().__new__(cls, entries)
        made.mark = mark
        return made


class One(NamedTuple):
    entry: Any


_pytree.register_pytree_node(
    ByContext,
    lambda x: (list(x.values()), list(x)),
    lambda leaves, keys: ByContext(zip(keys, leaves, strict=True)),
    serialized_type_name="fuzz.ByContext",
)
_pytree.register_pytree_node(
    ByPaths,
    lambda x: (list(x.values()), tuple(x)),
    lambda leaves, keys: ByPaths(zip(keys, leaves, strict=True)),
    serialized_type_name="fuzz.ByPaths",
    flatten_with_keys_fn=lambda x: ([(_pytree.MappingKey(k), v) for k, v in x.items()], tuple(x)),
)


def _updated(container: Any, items: dict[Any, Any]) -> Any:
    container.update(items)
    return container


def _extended(container: Any, entries: list[Any]) -> Any:
    container.extend(entries)
    return container


_DICTS = (
    dict,
    OrderedDict,
    lambda items: defaultdict(list, items),
    Sub,
    lambda items: _updated(Configured("c", next(iter(items.values()))), items),
    Refusing,
    ByContext,
    ByPaths,
    lambda items: _updated(Stored("s"), items),
    UserDict,
    lambda items: Holder(items),
)
_LISTS = (
    list,
    tuple,
    deque,
    UserList,
    lambda entries: _extended(Counted(3), entries),
    lambda entries: Marked("m", entries),
    lambda entries: One(entries),
)


def wrapped(tree: Any, seed: int, order: int) -> Any:
    """Return the tree in containers that the seed draws; `order` fills its dicts."""
    return _wrapped(tree, random.Random(seed), random.Random(order))


def _wrapped(tree: Any, kinds: random.Random, order: random.Random) -> Any:
    if isinstance(tree, dict):
        chosen = kinds.choice(_DICTS)
        items = {key: _wrapped(tree[key], kinds, order) for key in sorted(tree)}
        keys = order.sample(sorted(items), len(items))
        return chosen({key: items[key] for key in keys})
    if isinstance(tree, list):
        chosen_list: Any = kinds.choice(_LISTS)
        return chosen_list([_wrapped(entry, kinds, order) for entry in tree])
    return Holder(tree) if kinds.random() < 0.15 else tree


def plain(value: Any) -> Any:
    """Return the dicts and lists in containers."""
    if isinstance(value, Holder):
        return plain(value.held)
    if isinstance(value, One):
        return plain(value.entry)
    if isinstance(value, Mapping):
        return {key: plain(value[key]) for key in sorted(value)}
    if isinstance(value, list | tuple | deque | UserList):
        return [plain(entry) for entry in value]
    return value
