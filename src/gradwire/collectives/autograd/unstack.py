"""A result taken apart without copying: tensors of their own, side by side in one block of memory.

Autograd's views of one tensor may not be changed in place when a function returns several; these
are no views, and as no element belongs to two of them, changing one leaves the others right.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor
from torch.autograd import Function, forward_ad

from gradwire.collectives.autograd.linear import compiling
from gradwire.collectives.wire.backends import empty

__all__ = ["apart", "joined"]


class _Apart(Function):
    @staticmethod
    def forward(whole: Tensor, sizes: Sequence[int], numbers: bool) -> tuple[Tensor, ...]:
        return _cut(whole, sizes, numbers)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, _, ctx.numbers = inputs

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        return joined(cotangents, ctx.numbers), None, None


_apply_apart = super(Function, _Apart).apply  # see linear.py


def apart(whole: Tensor, sizes: Sequence[int], numbers: bool = False) -> tuple[Tensor, ...]:
    """The rows of a tensor that nobody else holds, in tensors of that many rows.

    Args:
        whole: A contiguous result, given away: it shares its memory with the parts.
        sizes: The rows of each part; they add up to those of `whole`.
        numbers: Give 0-d tensors; the sizes are 1 then, and `whole` has one dim.
    """
    transformed = torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
    if transformed or compiling(whole):
        parts = whole.unbind() if numbers else whole.split_with_sizes(sizes)
        return tuple(part.clone() for part in parts)
    if whole.requires_grad:
        return _apply_apart(whole, sizes, numbers)  # type: ignore[no-any-return, no-untyped-call]
    return _cut(whole, sizes, numbers)


def joined(parts: tuple[Tensor, ...], numbers: bool) -> Tensor:
    """What `apart` was given: the inverse, differentiable where grad mode is on."""
    if numbers:
        return torch.stack(parts)
    followed = torch.is_grad_enabled() or forward_ad._current_level >= 0
    if followed or any(is_legacy_batchedtensor(part) for part in parts):
        return torch.cat(parts)
    return torch.cat(parts, out=empty(parts[0], sum(part.shape[0] for part in parts)))


def _cut(whole: Tensor, sizes: Sequence[int], numbers: bool) -> tuple[Tensor, ...]:
    parts = whole.unbind() if numbers else whole.split_with_sizes(sizes)
    return tuple(part.data for part in parts)
