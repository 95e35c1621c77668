"""Statistics over a group, which treat the ranks as an additional dim to reduce.

`dim` names dims of the tensor that are reduced along with the ranks. The functions are composed of
differentiable operations, so that derivatives of every order exist. Values that are subtracted or
divided by for precision carry no gradient.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from gradwire.collectives import wire
from gradwire.collectives.arguments import check_dense, resolve_group, valid_dim
from gradwire.collectives.autograd import concat
from gradwire.collectives.ops.all_reduce import all_reduce
from gradwire.collectives.reduce_ops import check_reducible
from gradwire.errors import ArgumentError

Dims = int | Sequence[int]


def mean(
    x: Tensor,
    dim: Dims = (),
    *,
    keepdim: bool = False,
    group: ProcessGroup | None = None,
    check: bool | None = None,
) -> Tensor:
    """Compute the mean over the ranks, and over dims of the tensor.

    Args:
        x: Floating-point or complex tensor. Sizes in `dim` may differ between ranks; every element
            has the same weight.
        dim: Dim or dims to reduce; none for the mean over the ranks only.
        keepdim: True to keep reduced dims, with size 1.
        group: Process group; the default group if None.
        check: True to compare the call with the other ranks first; see `checks`.

    Adjoint: the sum of the cotangents, divided by the number of elements.

    Example:
        >>> from gradwire.collectives import mean
        >>> def main():
        ...     x = torch.arange(3.0) if dist.get_rank() == 0 else torch.tensor([7.0])
        ...     return mean(x, 0)
        >>> run_ranks(main, world_size=2)  # of 0, 1, 2 and 7
        [tensor(2.5000), tensor(2.5000)]
    """
    total, count = _sum_and_count(_wide(x), dim, keepdim, resolve_group(group), check)
    return (total / count).to(x.dtype)


def var(
    x: Tensor,
    dim: Dims = (),
    *,
    correction: float = 1,
    keepdim: bool = False,
    group: ProcessGroup | None = None,
    check: bool | None = None,
) -> Tensor:
    """Compute the variance over the ranks, and over dims of the tensor, in two passes.

    Args:
        x: Floating-point or complex tensor. Sizes in `dim` may differ between ranks.
        dim: Dim or dims to reduce; none for the variance over the ranks only.
        correction: Difference between the number of elements and the divisor.
        keepdim: True to keep reduced dims, with size 1.
        group: Process group; the default group if None.
        check: True to compare the call with the other ranks first; see `checks`.

    Adjoint: composed of the adjoint of `all_reduce`.

    Example:
        >>> from gradwire.collectives import var
        >>> run_ranks(lambda: var(torch.tensor(2.0 * dist.get_rank())), world_size=2)
        [tensor(2.), tensor(2.)]
    """
    group = resolve_group(group)
    wide = _wide(x)
    centred = wide - mean(wide, dim, keepdim=True, group=group, check=check)
    squares = (centred * centred.conj()).real if x.is_complex() else centred * centred
    total, count = _sum_and_count(squares, dim, keepdim, group, check)
    return (total / (count - correction).clamp_min(0)).to(x.real.dtype)


def norm(
    x: Tensor,
    p: float = 2,
    dim: Dims = (),
    *,
    keepdim: bool = False,
    group: ProcessGroup | None = None,
    check: bool | None = None,
) -> Tensor:
    """Compute the p-norm over the ranks, and over dims of the tensor, without overflow.

    Args:
        x: Floating-point or complex tensor. Sizes in `dim` may differ between ranks.
        p: Order of the norm, ≥ 1; may be inf.
        dim: Dim or dims to reduce; none for the norm over the ranks only.
        keepdim: True to keep reduced dims, with size 1.
        group: Process group; the default group if None.
        check: True to compare the call with the other ranks first; see `checks`.

    Adjoint: composed of the adjoint of `all_reduce`; zero where the norm is zero.

    Raises:
        ArgumentError: p is below 1.

    Example:
        >>> from gradwire.collectives import norm
        >>> run_ranks(lambda: norm(torch.tensor(3.0 + dist.get_rank())), world_size=2)
        [tensor(5.), tensor(5.)]
    """
    if not p >= 1:
        raise ArgumentError(f"p is {p}: give a number of at least 1, or inf")
    group = resolve_group(group)
    wide = _wide(x)
    size = wide.abs()
    dims = _dims(x, dim)
    if p == float("inf"):
        # The norm of no elements is 0.
        top = _maximum(size, dims, group, check).clamp_min(0)
        return _squeezed(top, dims, keepdim).to(x.real.dtype)
    scale = _maximum(size.detach(), dims, group, check)
    scale = torch.where((scale == 0) | scale.isinf(), 1, scale)
    if p % 2 == 0:
        # Not of abs, whose derivatives at 0 are 0, unlike those of the square.
        squares = (wide.real / scale).square()
        if x.is_complex():
            squares = squares + (wide.imag / scale).square()
        powers = squares if p == 2 else squares ** (p / 2)
    else:
        powers = (size / scale) ** p
    total = all_reduce(_sum(powers, dims), group=group, check=check)
    # The root has an infinite slope at 0: keep value and gradient from passing through it there.
    is_zero = total == 0
    root = torch.where(is_zero, 1, total) ** (1 / p)
    return _squeezed(torch.where(is_zero, 0, root * scale), dims, keepdim).to(x.real.dtype)


def logsumexp(
    x: Tensor,
    dim: Dims = (),
    *,
    keepdim: bool = False,
    group: ProcessGroup | None = None,
    check: bool | None = None,
) -> Tensor:
    """Compute log Σ exp(x) over the ranks, and over dims of the tensor, without overflow.

    Args:
        x: Floating-point tensor. Sizes in `dim` may differ between ranks.
        dim: Dim or dims to reduce; none for the sum over the ranks only.
        keepdim: True to keep reduced dims, with size 1.
        group: Process group; the default group if None.
        check: True to compare the call with the other ranks first; see `checks`.

    Adjoint: the sum of the cotangents, times `softmax`.

    Raises:
        ArgumentError: The tensor is not floating-point.

    Example:
        >>> from gradwire.collectives import logsumexp
        >>> run_ranks(lambda: logsumexp(torch.tensor(1000.0)), world_size=2)
        [tensor(1000.6932), tensor(1000.6932)]
    """
    group = resolve_group(group)
    wide = _wide(x)
    check_reducible(wide, "max")
    dims = _dims(x, dim)
    top = _maximum(wide.detach(), dims, group, check)
    top = torch.where(top.isinf(), 0, top)
    total = all_reduce(_sum((wide - top).exp(), dims), group=group, check=check)
    return _squeezed(total.log() + top, dims, keepdim).to(x.dtype)


def softmax(
    x: Tensor, dim: Dims = (), *, group: ProcessGroup | None = None, check: bool | None = None
) -> Tensor:
    """Compute exp(x), divided by its sum over the ranks and over dims of the tensor.

    Args:
        x: Floating-point tensor. Sizes in `dim` may differ between ranks, as those of the shards of
            a vocabulary do.
        dim: Dim or dims to reduce; none for the sum over the ranks only.
        group: Process group; the default group if None.
        check: True to compare the call with the other ranks first; see `checks`.

    Returns:
        This rank's part, of the shape of `x`.

    Adjoint: composed of the adjoint of `logsumexp`.

    Example:
        >>> from gradwire.collectives import softmax
        >>> run_ranks(lambda: softmax(torch.zeros(2), 0), world_size=2)
        [tensor([0.2500, 0.2500]), tensor([0.2500, 0.2500])]
    """
    wide = _wide(x)
    total = logsumexp(wide, dim, keepdim=True, group=group, check=check)
    # A contiguous copy: exp keeps its result for backward, and its result has the strides of x.
    return (wide - total).exp().to(x.dtype, copy=True, memory_format=torch.contiguous_format)


def _wide(x: Tensor) -> Tensor:
    """Convert to a dtype with enough precision and range for sums and counts.

    Raises:
        ArgumentError: The dtype is not floating-point or complex, or PyTorch cannot compute with
            it.
    """
    check_dense(x)
    if not (x.is_floating_point() or x.is_complex()):
        raise ArgumentError(f"x is {x.dtype}: give floating-point or complex numbers")
    check_reducible(x, "sum")
    return x.to(wire.wider(x.dtype))


def _sum_and_count(
    x: Tensor, dim: Dims, keepdim: bool, group: ProcessGroup, check: bool | None
) -> tuple[Tensor, Tensor]:
    """Return the sum and the number of elements, which are reduced in one message."""
    dims = _dims(x, dim)
    part = _sum(x, dims)
    count = part.new_full((1,), _count(x, dims))
    both = all_reduce(concat([part.reshape(-1), count]), group=group, check=check)
    total = _squeezed(both[:-1].reshape(part.shape), dims, keepdim)
    return total, both[-1].detach().real


def _count(x: Tensor, dims: Sequence[int]) -> int:
    count = 1  # not math.prod of a generator, which Dynamo does not trace
    for dim in dims:
        count *= x.shape[dim]
    return count


def _dims(x: Tensor, dim: Dims) -> list[int]:
    given = [dim] if isinstance(dim, int) else list(dim)
    dims = [valid_dim(d, x.dim(), x.shape) for d in given]
    if len(set(dims)) < len(dims):
        raise ArgumentError(f"dim is {given}: a dim occurs twice")
    return dims


def _sum(x: Tensor, dims: Sequence[int]) -> Tensor:
    return x.sum(list(dims), keepdim=True) if dims else x


def _maximum(x: Tensor, dims: Sequence[int], group: ProcessGroup, check: bool | None) -> Tensor:
    """Return the maximum over ranks and dims, which are kept; empty ranks are ignored."""
    if _count(x, dims) == 0:
        shape = [1 if d in dims else size for d, size in enumerate(x.shape)]
        # Connected to the tensor's graph, so that backward runs on all ranks.
        top = x.new_full(shape, float("-inf")) + _sum(x, dims)
    else:
        top = x.amax(list(dims), keepdim=True) if dims else x
    result: Tensor = all_reduce(top, "max", group=group, check=check)
    return result


def _squeezed(x: Tensor, dims: Sequence[int], keepdim: bool) -> Tensor:
    return x if keepdim else x.squeeze(tuple(dims)) if dims else x
