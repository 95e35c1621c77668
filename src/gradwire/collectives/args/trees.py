"""Lists, dicts and the like of tensors: which leaf of one rank belongs to which of another."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from enum import Enum
from numbers import Number
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils import _pytree

__all__ = ["leaf_order", "leaves_text"]

_DICTS = (dict, OrderedDict, defaultdict)


def leaf_order(tree: Any) -> list[tuple[str, int]]:
    """The name of each leaf and its place in `tree_flatten`, in an order that equal trees share.

    Dicts with the same keys are equal, in whatever order they were filled, and ranks may have
    filled them differently: they are sorted here, by what tells keys apart on all ranks.
    """
    return _order(tree, "", 0)[0]


def _order(node: Any, name: str, first: int) -> tuple[list[tuple[str, int]], int]:
    """The leaves of a node, whose places begin with `first`; and the place after them."""
    if type(node) in (Tensor, Parameter):  # first: pytree takes a microsecond to say so
        return [(name, first)], first + 1
    if type(node) in _DICTS:
        parts = []
        for key, child in node.items():
            text = _text(key)
            leaves, first = _order(child, f"{name}[{text}]", first)
            parts.append((text, leaves))
        parts.sort(key=lambda part: part[0])  # those of one text remain as they were inserted
        return [leaf for _, leaves in parts for leaf in leaves], first
    if type(node) in (list, tuple) or _pytree.is_namedtuple_instance(node):
        found = []
        for i, child in enumerate(node):
            leaves, first = _order(child, f"{name}[{i}]", first)
            found += leaves
        return found, first
    after = first + len(_pytree.tree_leaves(node))
    return [(name, place) for place in range(first, after)], after


def _text(key: Any) -> str:
    """A key's text, the same in all processes: no address, hash or value of a tensor."""
    if isinstance(key, Enum):
        return f"{type(key).__name__}.{key.name}"
    if isinstance(key, str | bytes | Number | None):
        return repr(key)
    if isinstance(key, tuple):
        return f"({', '.join([_text(part) for part in key])})"
    if isinstance(key, frozenset):
        return f"{{{', '.join(sorted([_text(part) for part in key]))}}}"
    if isinstance(key, torch.dtype):
        return str(key)
    return f"<{type(key).__name__}>"


def leaves_text(order: Sequence[tuple[str, int]], leaves: Sequence[Tensor]) -> str:
    """Which leaf has which shape, for ranks to compare."""
    return "leaves " + ", ".join(f"{name} {tuple(leaves[i].shape)}" for name, i in order)
