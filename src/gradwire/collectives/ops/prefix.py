"""scan, exscan, and the product of the other ranks' tensors.

Backends do not have these operations. An all_to_all gives each rank all ranks' values of its 1/W of
the elements; PyTorch's differentiable operations combine them there; another all_to_all returns the
results. No temporary is larger than the tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from gradwire.collectives import wire
from gradwire.collectives.arguments import resolve_group
from gradwire.collectives.consistency import UNCHECKED, CheckContext, tensor_fields
from gradwire.collectives.handles import Handle
from gradwire.collectives.operation import Operation
from gradwire.collectives.ops.all_to_all import AllToAll
from gradwire.collectives.reduce_ops import check_reducible
from gradwire.collectives.signature import CallSignature
from gradwire.errors import ArgumentError

_OPS = ("sum", "max", "min", "product")


def scan(
    x: Tensor, op: str = "sum", *, group: ProcessGroup | None = None, check: bool | None = None
) -> Tensor:
    """Reduce the tensors of the ranks up to and including this one.

    Args:
        x: Tensor of the same shape on all ranks, with any strides.
        op: Reduction: "sum", "max", "min" or "product".
        group: Process group; the default group if None.
        check: True to compare the call with the other ranks first; see `checks`.

    Returns:
        The reduction over ranks 0 to r, on rank r.

    Adjoint: for a sum, the sum of the cotangents of this rank and all later ones; for the other
    ops, this sum with the op's rule as in `all_reduce`.

    Raises:
        ArgumentError: The op is not supported, or not defined for the dtype.
        MismatchError: With checks on, the ranks disagree.

    Example:
        >>> from gradwire.collectives import scan
        >>> run_ranks(lambda: scan(torch.tensor([dist.get_rank() + 1])), world_size=3)
        [tensor([1]), tensor([3]), tensor([6])]

    Source:
        MPI standard, MPI_Scan.
    """
    return _prefix("scan", x, op, resolve_group(group), check)


def exscan(
    x: Tensor, op: str = "sum", *, group: ProcessGroup | None = None, check: bool | None = None
) -> Tensor:
    """Reduce the tensors of the ranks before this one.

    Args:
        x: Tensor of the same shape on all ranks, with any strides.
        op: Reduction: "sum", "max", "min" or "product".
        group: Process group; the default group if None.
        check: True to compare the call with the other ranks first; see `checks`.

    Returns:
        The reduction over ranks 0 to r-1, on rank r. On rank 0, the op's neutral element: 0 for
        sum, 1 for product, the smallest number for max and the largest for min.

    Adjoint: for a sum, the sum of the cotangents of all later ranks; for the other ops, this sum
    with the op's rule as in `all_reduce`.

    Raises:
        ArgumentError: The op is not supported, or not defined for the dtype.
        MismatchError: With checks on, the ranks disagree.

    Example:
        >>> from gradwire.collectives import exscan
        >>> run_ranks(lambda: exscan(torch.tensor([dist.get_rank() + 1])), world_size=3)
        [tensor([0]), tensor([1]), tensor([3])]

    Source:
        MPI standard, MPI_Exscan.
    """
    return _prefix("exscan", x, op, resolve_group(group), check)


def _prefix(name: str, x: Tensor, op: str, group: ProcessGroup, check: bool | None) -> Tensor:
    if op not in _OPS:
        raise ArgumentError(f"op is {op!r}: for {name}, give one of {', '.join(_OPS)}")
    reduction = _up_to if name == "scan" else _before
    check_reducible(x, op, reduction)
    plan = _Prefix(group, lambda pieces: reduction(pieces, op))
    operation = Operation(
        x,
        group,
        lambda: CallSignature(name, *tensor_fields(x), reduce=op),
        lambda x, peers: plan,
    )
    return cast(Tensor, operation.run(check))


@dataclass(frozen=True)
class _Prefix:
    """Plan of a function of all ranks' values of each element: see `combine`."""

    group: ProcessGroup
    fn: Callable[[Tensor], Tensor]

    def apply(self, x: Tensor, context: CheckContext) -> Tensor:
        return combine(x, self.group, self.fn, context)

    def apply_async(self, x: Tensor, context: CheckContext) -> Handle[Tensor]:
        raise NotImplementedError


def _up_to(pieces: Tensor, op: str) -> Tensor:
    """Return, in row r, the reduction of rows 0 to r."""
    if op == "sum":
        return pieces.cumsum(0, dtype=pieces.dtype)
    if op == "product":
        return _before(pieces, op) * pieces
    return torch.cat([_exclusive_extremum(pieces, op)[1:], _extremum(pieces, op).unsqueeze(0)])


def _before(pieces: Tensor, op: str) -> Tensor:
    """Return, in row r, the reduction of the rows before r."""
    if op in ("max", "min"):
        return _exclusive_extremum(pieces, op)
    fn: Callable[[Tensor, Tensor], Tensor] = torch.add if op == "sum" else torch.mul
    return exclusive_scan(pieces, fn, 0 if op == "sum" else 1)


def _exclusive_extremum(pieces: Tensor, op: str) -> Tensor:
    """Return, in row r, the extremum of the rows before r.

    Each row is computed from scratch, so that ties share the gradient equally.
    """
    least: float
    most: float
    if pieces.is_floating_point():
        least, most = float("-inf"), float("inf")
    elif pieces.dtype == torch.bool:
        least, most = False, True
    else:
        limits = torch.iinfo(pieces.dtype)
        least, most = limits.min, limits.max
    first = filled_row(least if op == "max" else most, pieces)
    return torch.stack([first, *(_extremum(pieces[:r], op) for r in range(1, len(pieces)))])


def _extremum(pieces: Tensor, op: str) -> Tensor:
    return pieces.amax(0) if op == "max" else pieces.amin(0)


def combine(
    x: Tensor,
    group: ProcessGroup,
    fn: Callable[[Tensor], Tensor],
    context: CheckContext = UNCHECKED,
) -> Tensor:
    """Apply `fn` to the stacked tensors of all ranks; return row r of the result on rank r.

    Args:
        x: Tensor of the same shape on all ranks.
        group: Process group of W ranks.
        fn: Function from (W, n) to (W, n) that treats columns independently.
        context: Context for the backwards of both exchanges.
    """
    world = group.size()
    flat = x.reshape(-1)
    if flat.shape[0] % world:
        sizes = wire.split_sizes(flat.shape[0], world)
        mine = (sizes[group.rank()],) * world
        to_shards, from_shards = AllToAll(group, sizes, mine), AllToAll(group, mine, sizes)
    else:
        to_shards = from_shards = AllToAll(group)
    pieces = to_shards.apply(flat, context)
    pieces = fn(pieces.reshape(world, pieces.shape[0] // world))
    return from_shards.apply(pieces.reshape(-1), context).reshape(x.shape)


def exclusive_product(x: Tensor, group: ProcessGroup) -> Tensor:
    """Return the product of the other ranks' tensors; exact if some elements are zero."""

    def others(pieces: Tensor) -> Tensor:
        before = exclusive_scan(pieces, torch.mul, 1)
        after = exclusive_scan(pieces.flip(0), torch.mul, 1).flip(0)
        return before * after

    return combine(x, group, others)


def exclusive_scan(pieces: Tensor, fn: Callable[[Tensor, Tensor], Tensor], start: float) -> Tensor:
    """Return, in row r, `fn` accumulated over all rows before r; row 0 is filled with `start`."""
    rows = [filled_row(start, pieces)]
    for piece in pieces[:-1]:
        rows.append(fn(rows[-1], piece))
    return torch.stack(rows)


def filled_row(value: float, pieces: Tensor) -> Tensor:
    """Return a row filled with a number; in a group of one rank, it depends on the pieces.

    With one rank the row is the whole result. Without a connection to the graph, backward would not
    reach earlier collectives, in which other ranks may wait.
    """
    row = torch.full_like(pieces[0], value)
    alone = len(pieces) == 1 and (pieces.is_floating_point() or pieces.is_complex())
    return row + pieces[:0].sum(0, dtype=pieces.dtype) if alone else row
