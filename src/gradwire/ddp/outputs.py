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
"""How many objects inside each other are looked into that are not of the kinds known here, and how
many values there: they may have a tokenizer, with all its words."""


def _in_attributes(value: Any, seen: set[int]) -> Iterator[Tensor]:
    """Tensors that an object of another class has, such as a distribution, or one inside of it.

    The nearest first. It runs no code of the objects, which may be anything, in cycles too.
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
    """Whether an object has attributes of its own, which are not a module's."""
    if isinstance(value, nn.Module | type | ModuleType):
        return False
    try:
        return type(object.__getattribute__(value, "__dict__")) is dict
    except Exception:  # what stands for another object has it made, or has none
        return False


def _items(container: dict[Any, Any] | list[Any] | tuple[Any, ...]) -> Iterable[Any]:
    """What is in a container, whose class may have other methods."""
    if isinstance(container, dict):
        return dict.values(container)
    return list.__iter__(container) if isinstance(container, list) else tuple.__iter__(container)


def beginnings(output: Any, since: int) -> Iterator[Tensor]:
    """The tensors at one of which a backward through a forward's output begins.

    A view that is written to in place (what ends in `squeeze`, by `out += 1`) has another node from
    then on, and its hooks are left behind: backward then comes by what it is a view of.

    Args:
        output: What the forward returned.
        since: autograd's sequence number when the forward began.
    """
    seen: set[int] = set()
    for leaf in leaves(output):
        if isinstance(leaf, Tensor):
            yield leaf
            base = leaf._base if leaf.requires_grad else None
            other: Iterable[Tensor] = () if base is None else (base,)
        else:
            other = _in_attributes(leaf, seen)
        for tensor in other:  # of this forward alone: an object may have more than its result
            if tensor.grad_fn is not None and tensor.grad_fn._sequence_nr() >= since:
                yield tensor


def with_own_nodes(output: Any, since: int) -> Any:
    """The output of a forward, with views in place of inputs that it returned as they came.

    That is what it was given, or what a module inside has put out. A backward reaches the outputs
    of several modules in the same order on every rank only if each has a node that its forward
    made, on ranks whose forward has done nothing, too.

    Args:
        output: What the forward returned.
        since: autograd's sequence number when the forward began.
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
    """Mark the node that made a tensor as where the backward of a forward begins.

    The node holds the forward's object as long as it lives itself.
    """
    assert tensor.grad_fn is not None
    _metadata(tensor.grad_fn)[OUTPUT] = forward


def _metadata(node: Any) -> dict[str, Any]:
    """What is kept with a node of autograd."""
    metadata: dict[str, Any] = node.metadata  # torch's stub has it as a method
    return metadata
