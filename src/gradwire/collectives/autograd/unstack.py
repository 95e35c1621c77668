"""unstack and concat, each the other's backward; unstack copies nothing.

Autograd forbids in-place changes of views when a function returns several of them. The tensors that
`unstack` gives share memory without being views for autograd; no element belongs to two of them, so
that an in-place change of one leaves the others right.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor
from torch.autograd import Function

from gradwire.collectives.autograd.linear_collective import compiling, eager_apply, is_transformed
from gradwire.collectives.wire.backends import empty_rows


class _Unstack(Function):
    @staticmethod
    def forward(x: Tensor, sizes: Sequence[int], scalars: bool) -> tuple[Tensor, ...]:
        return _pieces(x, sizes, scalars)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, _, ctx.scalars = inputs

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        return torch.stack(cotangents) if ctx.scalars else concat(cotangents), None, None


_apply_unstack = eager_apply(_Unstack)


def unstack(x: Tensor, sizes: Sequence[int], scalars: bool = False) -> tuple[Tensor, ...]:
    """The rows of a tensor as one tensor for each size, in the memory of `x`.

    Args:
        x: Contiguous, and used by nobody else: it shares its memory with the results.
        sizes: The rows of each result; they add up to those of `x`.
        scalars: Give 0-d tensors; the sizes are 1 then, and `x` has one dim.
    """
    if compiling(x) or is_transformed():
        pieces = x.unbind() if scalars else x.split_with_sizes(sizes)
        return tuple(piece.clone() for piece in pieces)
    if x.requires_grad:
        return _apply_unstack(x, sizes, scalars)  # type: ignore[no-any-return]
    return _pieces(x, sizes, scalars)


def concat(pieces: Sequence[Tensor], dim: int = 0) -> Tensor:
    """`torch.cat`, with a graph for pieces of shape (0,), and large results in huge pages."""
    if dim == 0 and not (torch.is_grad_enabled() or _is_traced(pieces)):
        rows = sum(piece.shape[0] for piece in pieces)
        return torch.cat([*pieces], out=empty_rows(pieces[0], rows))
    joined = torch.cat([*pieces], dim)
    # torch.cat's backward leaves pieces of shape (0,) out. Where a second derivative goes on from
    # there to a collective, other ranks, whose pieces have elements, would wait in it.
    empties = [piece for piece in pieces if piece.shape == (0,) and piece.requires_grad]
    # Subtracted, because -0.0 - 0.0 keeps its sign.
    return joined - torch.stack(empties).sum() if empties else joined


def _is_traced(xs: Sequence[Tensor]) -> bool:
    """Whether something other than autograd follows what is computed: no `out=` then."""
    return compiling(xs[0]) or is_transformed() or any(is_legacy_batchedtensor(x) for x in xs)


def _pieces(x: Tensor, sizes: Sequence[int], scalars: bool) -> tuple[Tensor, ...]:
    pieces = x.unbind() if scalars else x.split_with_sizes(sizes)
    return tuple(piece.data for piece in pieces)
