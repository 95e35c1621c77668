"""scan and exscan: reductions over the ranks before this one."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from gradwire.collectives.args.reductions import check_reducible
from gradwire.collectives.args.validation import resolve_group
from gradwire.collectives.autograd.linear_collective import apply_linear
from gradwire.collectives.checks import consistency
from gradwire.collectives.checks.call_signature import CallSignature
from gradwire.collectives.checks.consistency import UNCHECKED, CheckContext
from gradwire.collectives.ops.checked import run_checked
from gradwire.collectives.ops.plans import AllToAll
from gradwire.collectives.wire import split_sizes
from gradwire.errors import ArgumentError

_OPS = ("sum", "max", "min", "product")


def scan(
    x: Tensor, op: str = "sum", *, group: ProcessGroup | None = None, check: bool | None = None
) -> Tensor:
    """The reduction of the tensors of the ranks up to this one.

    Args:
        x: The same shape on all ranks, any strides.
        op: "sum", "max", "min" or "product".
        group: The default group, if None.
        check: Compare with the other ranks first; see `checks`.

    Returns:
        On rank r, the reduction over ranks 0 to r.

    Adjoint: for a sum, the sum of the cotangents of this rank and those after it; for the others
    that, with the op's rule as in `all_reduce`.

    Raises:
        ArgumentError: The op is not one of these, or not defined for the dtype.
        MismatchError: With checks on, ranks disagree.

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
    """The reduction of the tensors of the ranks before this one.

    Args:
        x: The same shape on all ranks, any strides.
        op: "sum", "max", "min" or "product".
        group: The default group, if None.
        check: Compare with the other ranks first; see `checks`.

    Returns:
        On rank r, the reduction over ranks 0 to r-1; on rank 0 the op's neutral element: 0 for a
        sum, 1 for a product, the least number for max and the greatest for min.

    Adjoint: for a sum, the sum of the cotangents of the ranks after this one; for the others that,
    with the op's rule as in `all_reduce`.

    Raises:
        ArgumentError: The op is not one of these, or not defined for the dtype.
        MismatchError: With checks on, ranks disagree.

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
        raise ArgumentError(f"op is {op!r}: {name} takes {', '.join(_OPS)}")
    reduction = _up_to if name == "scan" else _before
    check_reducible(x, op, reduction)
    return run_checked(
        group,
        x,
        check,
        lambda: CallSignature(name, *consistency.tensor_fields(x), reduce=op),
        lambda x, context: combine(x, group, lambda pieces: reduction(pieces, op), context),
    )


def _up_to(pieces: Tensor, op: str) -> Tensor:
    """Row r is the reduction of the rows up to r."""
    if op == "sum":
        return pieces.cumsum(0, dtype=pieces.dtype)
    if op == "product":
        return _before(pieces, op) * pieces
    return torch.cat([_exclusive_extremum(pieces, op)[1:], _extremum(pieces, op).unsqueeze(0)])


def _before(pieces: Tensor, op: str) -> Tensor:
    """Row r is the reduction of the rows before r."""
    if op in ("max", "min"):
        return _exclusive_extremum(pieces, op)
    fn: Callable[[Tensor, Tensor], Tensor] = torch.add if op == "sum" else torch.mul
    return exclusive_scan(pieces, fn, 0 if op == "sum" else 1)


def _exclusive_extremum(pieces: Tensor, op: str) -> Tensor:
    """Row r is the extremum of the rows before r; each row anew, so that ties share equally."""
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
    """Row r, on rank r, of `fn` of all ranks' tensors stacked.

    Args:
        x: The same shape on all ranks.
        group: The group of W ranks.
        fn: From (W, n) to (W, n), column by column.
        context: For the backwards of both exchanges.
    """
    world = group.size()
    flat = x.reshape(-1)
    if flat.shape[0] % world:
        sizes = split_sizes(flat.shape[0], world)
        mine = (sizes[group.rank()],) * world
        to_shards, from_shards = AllToAll(group, sizes, mine), AllToAll(group, mine, sizes)
    else:
        to_shards = from_shards = AllToAll(group)
    pieces = apply_linear(to_shards, flat, context)
    pieces = fn(pieces.reshape(world, pieces.shape[0] // world))
    return apply_linear(from_shards, pieces.reshape(-1), context).reshape(x.shape)


def exclusive_product(x: Tensor, group: ProcessGroup) -> Tensor:
    """On each rank the product of the other ranks' tensors; exact where some are zero."""

    def others(pieces: Tensor) -> Tensor:
        before = exclusive_scan(pieces, torch.mul, 1)
        after = exclusive_scan(pieces.flip(0), torch.mul, 1).flip(0)
        return before * after

    return combine(x, group, others)


def exclusive_scan(pieces: Tensor, fn: Callable[[Tensor, Tensor], Tensor], start: float) -> Tensor:
    """Row r is `fn` over all rows before r; the first is filled with `start`."""
    rows = [filled_row(start, pieces)]
    for piece in pieces[:-1]:
        rows.append(fn(rows[-1], piece))
    return torch.stack(rows)


def filled_row(value: float, pieces: Tensor) -> Tensor:
    """A row filled with a number; in a group of one rank, computed from the pieces.

    There the row is the whole result, and without its place in the graph backward would not reach
    collectives that lie before, in which other ranks may wait.
    """
    row = torch.full_like(pieces[0], value)
    alone = len(pieces) == 1 and (pieces.is_floating_point() or pieces.is_complex())
    return row + pieces[:0].sum(0, dtype=pieces.dtype) if alone else row
