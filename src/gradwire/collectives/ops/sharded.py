"""Functions of all ranks' tensors that no backend has: scans, and products of the other ranks.

An all_to_all gives each rank all ranks' values of its 1/W of the elements; torch's own
differentiable operations combine them there; an all_to_all sends the results back. No temporary is
larger than the tensor.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from gradwire.collectives.autograd.linear_collective import apply_linear
from gradwire.collectives.checks.consistency import UNCHECKED, CheckContext
from gradwire.collectives.ops.plans import AllToAll
from gradwire.collectives.wire import split_sizes

__all__ = ["combine", "exclusive_product", "exclusive_scan", "filled_row"]


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
