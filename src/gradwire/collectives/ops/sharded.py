"""A tensor dealt out by parts, so that each rank holds all ranks' values of its part.

What combines the ranks' values in a way that engines do not know is done here without a temporary
larger than the tensor: exchange, combine the pieces with torch's own differentiable operations,
exchange back.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from gradwire.collectives.autograd.linear import linear
from gradwire.collectives.ops.all_to_all import AllToAll

__all__ = ["combine", "exclusive_product", "part_sizes", "row_of", "running"]


def combine(x: Tensor, group: ProcessGroup, fn: Callable[[Tensor], Tensor]) -> Tensor:
    """`fn` of all ranks' tensors stacked, back on the ranks: row r of its result goes to rank r.

    Args:
        x: The same shape on all ranks.
        group: The group of W ranks.
        fn: From (W, n) to (W, n), each column for itself.
    """
    world = group.size()
    flat = x.reshape(-1)
    if flat.shape[0] % world:
        sizes = tuple(part_sizes(flat.shape[0], world))
        mine = (sizes[group.rank()],) * world
        there, back = AllToAll(group, sizes, mine), AllToAll(group, mine, sizes)
    else:
        there = back = AllToAll(group)
    pieces = linear(there, flat)
    pieces = fn(pieces.reshape(world, pieces.shape[0] // world))
    return linear(back, pieces.reshape(-1)).reshape(x.shape)


def part_sizes(rows: int, parts: int) -> list[int]:
    """How `torch.tensor_split` divides rows."""
    small, more = divmod(rows, parts)
    return [small + (i < more) for i in range(parts)]


def exclusive_product(x: Tensor, group: ProcessGroup) -> Tensor:
    """On each rank the product of the other ranks' tensors; exact where some are zero."""

    def others(pieces: Tensor) -> Tensor:
        before = running(pieces, torch.mul, 1)
        after = running(pieces.flip(0), torch.mul, 1).flip(0)
        return before * after

    return combine(x, group, others)


def running(pieces: Tensor, fn: Callable[[Tensor, Tensor], Tensor], start: float) -> Tensor:
    """Row r is `fn` over all rows before r; the first is filled with `start`."""
    rows = [row_of(start, pieces)]
    for piece in pieces[:-1]:
        rows.append(fn(rows[-1], piece))
    return torch.stack(rows)


def row_of(value: float, pieces: Tensor) -> Tensor:
    """A row filled with a number, that has a place in the graph of the pieces.

    It is all that a group of one rank has, whose backward must go on to what came before: other
    ranks may wait there.
    """
    row = torch.full_like(pieces[0], value)
    alone = len(pieces) == 1 and (pieces.is_floating_point() or pieces.is_complex())
    return row + pieces[:0].sum(0, dtype=pieces.dtype) if alone else row
