"""Nested containers of tensors: which leaf of one rank belongs to which of another."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from enum import Enum
from numbers import Number
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from gradwire._containers import flatten_one_level

__all__ = ["Tree", "flatten_tree", "leaves_text"]


class Tree(NamedTuple):
    """A tree whose leaves are in an order that equal trees share.

    Attributes:
        names: Path of each leaf, the same on all ranks.
        leaves: The leaves.
        unflatten: Builds a tree of the same structure from other leaves in this order.
        has_context: True if a node's context, and not only names, says which leaf is which.
    """

    names: Sequence[str]
    leaves: Sequence[Any]
    unflatten: Callable[[Sequence[Any]], Any]
    has_context: bool


def flatten_tree(tree: Any) -> Tree:
    """Flatten a tree, with the children of dicts and their like sorted by key.

    Mappings with the same keys are equal, in whatever order they were filled, and ranks may have
    filled them differently. They are sorted by what tells keys apart on all ranks.
    """
    names: list[str] = []
    leaves: list[Any] = []
    contexts: list[str] = []
    build = _collect(tree, "", names, leaves, contexts)
    return Tree(names, leaves, build, bool(contexts))


def _collect(
    node: Any, name: str, names: list[str], leaves: list[Any], contexts: list[str]
) -> Callable[[Sequence[Any]], Any]:
    """Append a node's leaves in the shared order; return what builds it from all leaves."""
    # A tensor first: the common leaf needs no look at the other types.
    flattened = None if type(node) in (Tensor, Parameter) else flatten_one_level(node)
    if flattened is None:
        place = len(leaves)
        names.append(name)
        leaves.append(node)
        return lambda new: new[place]
    keys, children, unflatten = flattened.keys, flattened.children, flattened.unflatten
    if flattened.context is not None:
        text = _text(flattened.context)
        contexts.append(text)
        name += f"<{text}>"
    texts = [_text(key) for key in keys]
    order = list(range(len(texts)))
    if not isinstance(keys, range):
        order.sort(key=texts.__getitem__)  # those of one text remain as they were inserted
    builders = {
        i: _collect(children[i], f"{name}[{texts[i]}]", names, leaves, contexts) for i in order
    }
    return lambda new: unflatten([builders[i](new) for i in range(len(builders))])


def _text(key: Any) -> str:
    """Return a key's text, the same in all processes: no address, hash or value of a tensor."""
    if isinstance(key, Enum):
        return f"{type(key).__name__}.{key.name}"
    if isinstance(key, str | bytes | Number | None):
        return repr(key)
    if isinstance(key, tuple):
        return f"({', '.join([_text(part) for part in key])})"
    if isinstance(key, list):
        return f"[{', '.join([_text(part) for part in key])}]"
    if isinstance(key, dict):
        return f"{{{', '.join([f'{_text(k)}: {_text(part)}' for k, part in key.items()])}}}"
    if isinstance(key, set | frozenset):
        return f"{{{', '.join(sorted([_text(part) for part in key]))}}}"
    if isinstance(key, torch.dtype):
        return str(key)
    if dataclasses.is_dataclass(key) and not isinstance(key, type):
        fields = dataclasses.fields(key)
        parts = [f"{f.name}={_text(getattr(key, f.name, None))}" for f in fields]
        return f"{type(key).__name__}({', '.join(parts)})"
    return f"<{type(key).__name__}>"


def leaves_text(names: Sequence[str], leaves: Sequence[Tensor]) -> str:
    """Return which leaf has which shape, for ranks to compare."""
    pairs = zip(names, leaves, strict=True)
    return "leaves " + ", ".join(f"{name} {tuple(leaf.shape)}" for name, leaf in pairs)
