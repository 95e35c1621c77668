"""Nested containers: recognition, flattening and rebuilding."""

from __future__ import annotations

from collections import ChainMap, Counter, OrderedDict, UserList, defaultdict, deque
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import pytest
import torch
from fuzz.containers import Configured, Counted, Refusing, Stored
from torch import Tensor
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils import _pytree as pytree

from gradwire._containers import flatten_one_level, map_tensors, tensors_in
from gradwire.errors import ArgumentTypeError


class Attributes(dict[str, Any]):
    def __init__(self, **entries: Any) -> None:
        super().__init__(**entries)
        self.__dict__ = self


class Store(MutableMapping[str, Any]):
    """A mapping that is no dict, whose constructor takes something else."""

    def __init__(self, *, name: str) -> None:
        self.name, self.held = name, {}

    def __getitem__(self, key: str) -> Any:
        return self.held[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.held[key] = value

    def __delitem__(self, key: str) -> None:
        del self.held[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.held)

    def __len__(self) -> int:
        return len(self.held)


class Two(tuple[Any, ...]):
    def __new__(cls, first: Any, second: Any) -> Two:
        made = super().__new__(cls, (first, second))
        made.first = first
        return made


@dataclass(frozen=True)
class Later:
    x: Tensor
    unset: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "alias", self.x)


@dataclass
class Dropping:
    x: Tensor
    name: str = "default"


pytree.register_dataclass(Dropping, field_names=["x"], drop_field_names=["name"])


def filled(container: Any, x: Tensor) -> Any:
    container["x"] = x
    return container


def with_entry(container: Any, x: Tensor) -> Any:
    container.append(x)
    return container


X = torch.ones(2)
PACKED = pack_padded_sequence(torch.ones(3, 2, 1), torch.tensor([1, 3]), enforce_sorted=False)
CONTAINERS = {
    "defaultdict": (defaultdict(list, x=X), lambda v: v.default_factory),
    "Counter": (Counter(x=X), len),
    "OrderedDict": (OrderedDict(y=1, x=X), list),
    "constructor": (filled(Configured("c", X), X), lambda v: (v.first is v["x"], v.config)),
    "attributes": (Attributes(x=X, more=Attributes(y=X)), lambda v: v.more.y is v["more"]["y"]),
    "frozen": (Refusing(x=X), list),
    "UserDict": (filled(Stored("c"), X), lambda v: v.config),
    "mapping": (filled(Store(name="n"), X), lambda v: v.name),
    "proxy": (MappingProxyType({"x": X}), list),
    "ChainMap": (ChainMap({"x": X}, {"y": 1}), sorted),
    "UserList": (UserList([X, 1]), len),
    "list": (with_entry(Counted(3), X), lambda v: v.total),
    "deque": (deque([X], maxlen=2), lambda v: v.maxlen),
    "tuple": (Two(X, 1), lambda v: (v.first is v[0], v[1])),
    "return type": (torch.ones(2, 2).max(0), lambda v: v.values is v[0]),
    "dataclass": (Later(X), lambda v: v.alias is v.x),
    "registered dataclass": (Dropping(X, "given"), lambda v: v.name),
    "packed": (PACKED, lambda v: v.batch_sizes.tolist()),
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_containers_are_rebuilt(name: str) -> None:
    value, rest = CONTAINERS[name]
    before = list(tensors_in(value))
    assert before
    mapped = map_tensors(lambda t: t + 1, [value])[0]
    assert type(mapped) is type(value)
    assert [torch.equal(a, b + 1) for a, b in zip(tensors_in(mapped), before, strict=True)] == [
        True
    ] * len(before)
    assert rest(mapped) == rest(value)
    assert [id(t) for t in tensors_in(value)] == [id(t) for t in before]  # not changed
    assert map_tensors(lambda t: t, value) is value


def test_keys_of_registered_types() -> None:
    """From the paths, from the context, or from the mapping that they are; else by position."""

    class Base:
        def __init__(self, held: dict[str, Any]) -> None:
            self.held = held

    def register(kind: type, context: Any, **options: Any) -> None:
        pytree.register_pytree_node(
            kind,
            lambda v: (list(v.held.values()), context(list(v.held))),
            lambda new, keys: kind(dict(zip("ba", new, strict=True))),
            **options,
        )

    with_paths, with_context, opaque, without = (type(n, (Base,), {}) for n in "pcow")
    register(
        with_paths,
        lambda keys: None,
        flatten_with_keys_fn=lambda v: ([(pytree.MappingKey(k), x) for k, x in v.held.items()], 0),
    )
    register(with_context, lambda keys: keys)
    register(opaque, lambda keys: {"keys": keys})
    register(without, lambda keys: None)
    found = [
        flatten_one_level(k({"b": X, "a": X})) for k in (with_paths, with_context, opaque, without)
    ]
    assert [f and tuple(f.keys) for f in found] == [("b", "a"), ("b", "a"), (0, 1), (0, 1)]
    assert [f and f.context for f in found] == [None, None, {"keys": ["b", "a"]}, None]


def test_a_mapping_that_cannot_be_rebuilt() -> None:
    class Closed(Store):
        def __setitem__(self, key: str, value: Any) -> None:
            raise TypeError("closed")

    value = Closed(name="n")
    value.held["x"] = X
    with pytest.raises(ArgumentTypeError, match=r"a Closed cannot be rebuilt .* register"):
        map_tensors(lambda t: t + 1, value)
    assert list(tensors_in(value)) == [X]
    assert map_tensors(lambda t: t, value) is value
