"""Lists, dicts and the like of tensors: which leaf of one rank belongs to which of another."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.utils import _pytree

__all__ = ["leaf_order", "leaves_text"]

_DICTS = (dict, OrderedDict, defaultdict)


def leaf_order(tree: Any) -> list[tuple[str, int]]:
    """The name of each leaf and its place in `tree_flatten`, in an order that equal trees share.

    Dicts with the same keys are equal, in whatever order they were filled, and ranks may have
    filled them differently: the keys are sorted here, where they can be.
    """
    return _order(tree, "", 0)[0]


def _order(node: Any, name: str, first: int) -> tuple[list[tuple[str, int]], int]:
    """The leaves of a node, whose places begin with `first`; and the place after them."""
    if type(node) in _DICTS:
        parts = {}
        for key, child in node.items():
            parts[key], first = _order(child, f"{name}[{key!r}]", first)
        return [leaf for key in _sorted(node) for leaf in parts[key]], first
    if isinstance(node, list | tuple):
        found = []
        for i, child in enumerate(node):
            leaves, first = _order(child, f"{name}[{i}]", first)
            found += leaves
        return found, first
    after = first + len(_pytree.tree_leaves(node))
    return [(name, place) for place in range(first, after)], after


def _sorted(keys: Any) -> list[Any]:
    try:
        return sorted(keys, key=lambda key: (type(key).__name__, key))
    except TypeError:  # they have no order but that in which they were inserted
        return list(keys)


def leaves_text(order: Sequence[tuple[str, int]], leaves: Sequence[Tensor]) -> str:
    """Which leaf has which shape, for ranks to compare."""
    return "leaves " + ", ".join(f"{name} {tuple(leaves[i].shape)}" for name, i in order)
