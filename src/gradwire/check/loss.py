"""Reading of a loss's graph before backward: what it averages over, and what it was built from.

Saved tensors are read without unpacking, so that no hook of a checkpoint runs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from torch import Tensor
from torch._C._autograd import SavedTensor

from gradwire.check.observer import bit_sum, is_plain

_THROUGH = (
    "View",
    "ReshapeAlias",
    "UnsafeView",
    "Squeeze",
    "Unsqueeze",
    "ToCopy",
    "Clone",
    "Alias",
    "_DDPSink",
    "Select",
)
"""Beginnings of names of nodes that neither average nor scale."""
_MOST_TERMS = 16
_MOST_NODES = 4000
_SUM, _MEAN = 2, 1  # values of `reduction` in PyTorch's nodes


def terms_of(loss: Any) -> list[dict[str, Any]]:
    """Return the means that a loss is a sum of.

    Returns:
        For each mean its `count`, the number that it divides by; its `factor`, by which the loss
        multiplies it; and `builtin`, True if PyTorch's own function counted. Terms that are
        something else are left out.
    """
    found: list[dict[str, Any]] = []
    if isinstance(loss, Tensor) and loss.grad_fn is not None and loss.numel() == 1:
        _walk((loss.grad_fn, loss.output_nr), 1.0, found, 0)
    return found


def _walk(at: tuple[Any, int], factor: float, found: list[dict[str, Any]], depth: int) -> None:
    """Add the terms below a node's output."""
    node, output = at
    if node is None or depth > 32 or len(found) >= _MOST_TERMS:
        return
    name, inputs = node.name().removeprefix("torch::autograd::"), node.next_functions
    if name.startswith(("Add", "Sub")) and len(inputs) == 2:
        alpha = float(getattr(node, "_saved_alpha", 1))
        signs = (1.0, alpha if name.startswith("Add") else -alpha)
        for inner, sign in zip(inputs, signs, strict=True):
            _walk(inner, factor * sign, found, depth + 1)
    elif name.startswith("Neg"):
        _walk(inputs[0], -factor, found, depth + 1)
    elif name.startswith("Mul"):
        scaled = _scaled(node, inputs)
        if scaled is not None:
            _walk(scaled[0], factor * scaled[1], found, depth + 1)
    elif name.startswith("Div"):
        _walk_quotient(node, inputs, factor, found, depth)
    elif name.startswith(_THROUGH) and inputs:
        at = inputs[min(output, len(inputs) - 1)]
        _walk(at, factor, found, depth + 1)
    elif (count := _count(node, name)) is not None:
        found.append({"count": count, "factor": factor, "builtin": True})


def _scaled(node: Any, inputs: Any) -> tuple[Any, float] | None:
    """Return the factor of a product that needs a gradient, and the value of the other."""
    variable = [i for i, (inner, _) in enumerate(inputs) if inner is not None]
    if len(variable) != 1:
        return None
    by = _number(node, "other" if variable[0] == 0 else "self")
    return None if by is None else (inputs[variable[0]], by)


def _walk_quotient(
    node: Any, inputs: Any, factor: float, found: list[dict[str, Any]], depth: int
) -> None:
    if inputs[0][0] is None or (len(inputs) > 1 and inputs[1][0] is not None):
        return
    by = _number(node, "other")
    if by is None or by == 0.0:
        return
    if _is_sum(inputs[0][0], 0):
        found.append({"count": by, "factor": factor, "builtin": False})
    else:
        _walk(inputs[0], factor / by, found, depth + 1)


def _is_sum(node: Any, depth: int) -> bool:
    """Return True if a node adds up all elements, without dividing."""
    if node is None or depth > 4:
        return False
    if node.name() == "SumBackward0" or getattr(node, "_saved_reduction", None) == _SUM:
        return True
    return node.name().startswith(("Neg", *_THROUGH)) and _is_sum(
        node.next_functions[0][0], depth + 1
    )


def _count(node: Any, name: str) -> float | None:
    """Return the number of elements of a mean of PyTorch's; None for another node."""
    if name == "MeanBackward0":
        numel = getattr(node, "_saved_self_sym_numel", None)
        return None if numel is None else float(numel)
    if getattr(node, "_saved_reduction", None) != _MEAN:
        return None
    if name.startswith("NllLoss"):
        weighted = _saved(node, "weight") is not None
        return None if weighted else _number(node, "total_weight")
    inner = _saved(node, "self")
    return None if inner is None else float(inner.numel())


def _saved(node: Any, name: str) -> Tensor | None:
    raw = getattr(node, f"_raw_saved_{name}", None)
    try:
        data = getattr(raw, "data", None) if isinstance(raw, SavedTensor) else None  # or a list
    except RuntimeError:  # released, or none was saved
        return None
    return data if isinstance(data, Tensor) else None


def _number(node: Any, name: str) -> float | None:
    """Return a saved tensor of one element, or a saved number."""
    saved = _saved(node, name)
    if saved is not None:
        return float(saved) if saved.numel() == 1 and is_plain(saved) else None
    if hasattr(node, f"_raw_saved_{name}"):
        return None
    value = getattr(node, f"_saved_{name}", None)
    return float(value) if isinstance(value, (int, float)) else None


def uses(loss: Any, gathered: Collection[Tensor], own: Tensor) -> bool:
    """Return True if a loss's graph saved gathered tensors without their gradients.

    Tensors that were concatenated or transposed are recognized by the sum of their bits.

    Args:
        loss: Loss.
        gathered: Tensors of all ranks.
        own: Tensor of this rank, which the loss may also use by itself.
    """
    sums = [(t.numel(), bit_sum(t)) for t in gathered]
    mask = (1 << 64) - 1
    looked_for = {(numel, total & mask) for numel, total in sums if numel > 1}
    looked_for.discard((own.numel(), bit_sum(own) & mask))
    looked_for.add((sum(n for n, _ in sums), sum(total for _, total in sums) & mask))
    sizes = {numel for numel, _ in looked_for}
    for saved in _saved_tensors(getattr(loss, "grad_fn", None)):
        candidate = saved.numel() in sizes and not saved.requires_grad and is_plain(saved)
        if candidate and (saved.numel(), bit_sum(saved) & mask) in looked_for:
            return True
    return False


def _saved_tensors(root: Any) -> Iterator[Tensor]:
    seen, waiting = {root}, [root]
    while waiting and len(seen) < _MOST_NODES:
        node = waiting.pop()
        if node is None:
            continue
        for name in dir(type(node)):
            if name.startswith("_raw_saved_") and (saved := _saved(node, name[11:])) is not None:
                yield saved
        for inner, _ in node.next_functions:
            if inner is not None and inner not in seen:
                seen.add(inner)
                waiting.append(inner)
