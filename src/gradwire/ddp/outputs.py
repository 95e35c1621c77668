"""Tensors at which a backward through a module's output begins."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from gradwire._containers import leaves, map_tensors, tensors_in

OUTPUT = "gradwire.ddp.output"
_DEPTH, _MOST = 3, 4096
"""Limits on nested objects of other classes: levels and values searched. An object may have a
tokenizer with all of its words."""


def _in_attributes(value: Any, seen: set[int]) -> Iterator[Tensor]:
    """Yield the tensors in an object of another class, such as a distribution, at any level.

    The nearest tensors come first. No code of the objects runs; they may form cycles.
    """
    level, count = [value], 0
    for _ in range(_DEPTH):
        held = [object.__getattribute__(v, "__dict__") for v in level if _may_hold(v)]
        level = []
        while held:
            inside: list[Any] = []
            for container in held:
                if id(container) not in seen:
                    seen.add(id(container))
                    room = _MOST - count - len(inside)
                    inside += islice(_items(container), min(room, _MOST // 8))
            count += len(inside)
            held = []
            for v in inside:
                if isinstance(v, Tensor):
                    yield v
                else:
                    (held if isinstance(v, dict | list | tuple) else level).append(v)


def _may_hold(value: Any) -> bool:
    """Return True if an object has attributes, and is neither a module nor a class."""
    if isinstance(value, nn.Module | type | ModuleType):
        return False
    try:
        return type(object.__getattribute__(value, "__dict__")) is dict
    except Exception:  # proxies of other objects may compute __dict__, or have none
        return False


def _items(container: dict[Any, Any] | list[Any] | tuple[Any, ...]) -> Iterable[Any]:
    """Return a container's values without calling methods of its subclass."""
    if isinstance(container, dict):
        return dict.values(container)
    return list.__iter__(container) if isinstance(container, list) else tuple.__iter__(container)


def beginnings(output: Any, since: int) -> Iterator[Tensor]:
    """Yield the tensors at which a backward through a forward's output may begin.

    A view that is written in place (the result of `squeeze`, by `out += 1`) gets a new node,
    without its hooks. Backward then reaches the base of the view, which is therefore included.

    Args:
        output: Output of the forward.
        since: Sequence number of autograd when the forward began.
    """
    seen: set[int] = set()
    for leaf in leaves(output):
        if isinstance(leaf, Tensor):
            yield leaf
            base = leaf._base if leaf.requires_grad else None
            other: Iterable[Tensor] = () if base is None else (base,)
        else:
            other = _in_attributes(leaf, seen)
        for tensor in other:  # of this forward only: an object may also hold older tensors
            if tensor.grad_fn is not None and tensor.grad_fn._sequence_nr() >= since:
                yield tensor


def with_own_nodes(output: Any, since: int) -> Any:
    """Return the output of a forward, with views instead of tensors that it passed through.

    Such a tensor is an input of the forward, or an output of an inner module. A backward reaches
    the outputs of several modules in the same order on every rank only if each output has a node
    made by its forward, even on ranks whose forward does nothing.

    Args:
        output: Output of the forward.
        since: Sequence number of autograd when the forward began.
    """

    def is_other(t: Tensor) -> bool:
        if not t.requires_grad or t.layout != torch.strided:
            return False
        node = t.grad_fn
        return node is None or node._sequence_nr() < since or OUTPUT in _metadata(node)

    if not any(is_other(t) for t in tensors_in(output)):
        return output
    return map_tensors(lambda t: t.view_as(t) if is_other(t) else t, output)


def mark_output(tensor: Tensor, forward: object) -> None:
    """Mark the node of a tensor as the beginning of a forward's backward.

    The node references the forward's object for as long as the node lives.
    """
    assert tensor.grad_fn is not None
    _metadata(tensor.grad_fn)[OUTPUT] = forward


def _metadata(node: Any) -> dict[str, Any]:
    """Return the metadata dict of a node of autograd."""
    metadata: dict[str, Any] = node.metadata  # PyTorch's stub declares a method
    return metadata
