"""Modes of autograd, and the pair unstack and concat, each the other's backward.

unstack does not copy. Autograd forbids in-place modification of views if a function returns several
of them. The results of `unstack` share memory, but are not views for autograd. No element belongs
to two of them, so that modifying one in place does not affect the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import Function, forward_ad

from gradwire.collectives import wire


def graph_is_needed(x: Tensor) -> bool:
    """Return True if derivatives may be taken with respect to the tensor."""
    return (x.requires_grad and torch.is_grad_enabled()) or forward_ad._current_level >= 0


def is_transformed() -> bool:
    """Return True if a torch.func transform or forward mode is active."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def compiling(x: Tensor) -> bool:
    """Return True if the call is being traced, by Dynamo or below it with fake tensors."""
    return torch.compiler.is_compiling() or isinstance(x, (FakeTensor, FunctionalTensor))


def eager_apply(function: type[Function]) -> Callable[..., Any]:
    """Return a faster `apply` of a function, for use outside torch.func and compilers.

    If a function has a `setup_context`, PyTorch inspects the signature of `forward` in each call,
    for default arguments: 38 of the 70 µs of an all_reduce. PyTorch 2.15 does so in C++, earlier
    versions in `Function.apply`, which is bypassed here. A `forward` that takes the context is not
    inspected.
    """
    forward, setup_context = function.forward, function.setup_context

    def forward_with_context(ctx: Any, *inputs: Any) -> Any:
        output = forward(*inputs)
        setup_context(ctx, inputs, output)
        return output

    members = {
        "forward": staticmethod(forward_with_context),
        "setup_context": staticmethod(Function.setup_context),
    }
    eager = type(function.__name__, (function,), members)
    apply: Callable[..., Any] = super(Function, eager).apply  # type: ignore[misc]
    return apply


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
    """Split the rows of a tensor into one tensor for each size, in the memory of `x`.

    Args:
        x: Contiguous tensor, not used elsewhere: it shares its memory with the results.
        sizes: Number of rows of each result; they sum to the rows of `x`.
        scalars: True to return 0-d tensors; all sizes must be 1, and `x` must have one dim.
    """
    if compiling(x) or is_transformed():
        pieces = x.unbind() if scalars else x.split_with_sizes(sizes)
        return tuple(piece.clone() for piece in pieces)
    if x.requires_grad:
        return _apply_unstack(x, sizes, scalars)  # type: ignore[no-any-return]
    return _pieces(x, sizes, scalars)


def concat(pieces: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Concatenate as torch.cat, with a graph for pieces of shape (0,), and huge pages."""
    if dim == 0 and not (torch.is_grad_enabled() or _is_traced(pieces)):
        rows = sum(piece.shape[0] for piece in pieces)
        return torch.cat([*pieces], out=wire.empty_rows(pieces[0], rows))
    joined = torch.cat([*pieces], dim)
    # torch.cat's backward skips pieces of shape (0,). If a second derivative continued from there
    # to a collective, other ranks, whose pieces have elements, would wait in it.
    empties = [piece for piece in pieces if piece.shape == (0,) and piece.requires_grad]
    # Subtraction keeps the sign of -0.0.
    return joined - torch.stack(empties).sum() if empties else joined


def _is_traced(xs: Sequence[Tensor]) -> bool:
    """Return True if a tracer or transform follows the computation, which rules out `out=`."""
    return compiling(xs[0]) or is_transformed() or any(is_legacy_batchedtensor(x) for x in xs)


def _pieces(x: Tensor, sizes: Sequence[int], scalars: bool) -> tuple[Tensor, ...]:
    pieces = x.unbind() if scalars else x.split_with_sizes(sizes)
    return tuple(piece.data for piece in pieces)
