"""The copies that an operation between two processes needs, without any waiting for each other.

Both ranks do their part at once, on what happens to lie in the memory that they share: the result
means nothing, the time is what the memory takes. Ordinary tensors of another process cannot be
read, so that what it is to see has to pass through shared memory: through a small part of it, used
again and again, which stays in the cache.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.shm import segment

__all__ = ["bare_passes", "shared_by_two"]

PIECE = 64 << 10
"""Numbers copied at a time; as many lie in the small part."""

Move = tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]
"""Destination and source of a copy, or the operands of an addition."""


def shared_by_two(count: int) -> tuple[Tensor, Tensor]:
    """This rank's and the other's float32 numbers, `count` of each, in memory that both map."""
    paths: list[object] = [None]
    fd = -1
    if dist.get_rank() == 0:
        fd = segment.create(2 * 4 * count)
        paths = [f"/proc/{os.getpid()}/fd/{fd}"]
    dist.broadcast_object_list(paths)
    with open(str(paths[0]), "rb+") as file:
        both = segment.Mapping(file.fileno()).flat.view(torch.float32)
    dist.barrier()
    if fd >= 0:
        os.close(fd)
    first, second = both.chunk(2)
    return (first, second) if dist.get_rank() == 0 else (second, first)


def bare_passes(op: str, count: int, *, inside: bool) -> Callable[[], None]:
    """Return a function with only the copies and additions that two ranks need for an operation.

    Args:
        op: A collective.
        count: Numbers of its larger tensor.
        inside: True if the tensors are in shared memory.
    """
    half, root = count // 2, dist.get_rank() == 0
    if inside:
        mine, theirs = shared_by_two(2 * count)
        moves = _inside(op, mine.view(4, half), theirs.view(4, half), root)
    else:
        slot, other_slot = shared_by_two(PIECE)
        moves = _outside(op, torch.empty(4, half).fill_(1), slot, other_slot, root)
    steps = [
        tuple(_piece(tensor, lo) for tensor in move)
        for lo in range(0, half, PIECE)
        for move in moves
    ]

    def run() -> None:
        for target, *sources in steps:
            if len(sources) == 1:
                target.copy_(sources[0])
            else:
                torch.add(*sources, out=target)

    return run


def _piece(tensor: Tensor, lo: int) -> Tensor:
    return tensor if tensor.numel() <= PIECE else tensor[lo : lo + PIECE]


def _inside(op: str, mine: Tensor, theirs: Tensor, root: bool) -> list[Move]:
    """Work on two tensors per rank: rank 0 on their first halves, rank 1 on their second."""
    rank = 0 if root else 1
    half, other, c, d = mine[rank], theirs[rank], mine[2], mine[3]
    moves: dict[str, list[Move]] = {
        "all_reduce": [(half, half, other), (other, half)],
        "all_gather": [(c, half), (d, other)],
        "reduce_scatter": [(c, half, other)],
        "broadcast": [(other, half)] if root else [(half, other)],
        "all_to_all": [(c, half), (d, other)],
    }
    return moves[op]


def _outside(op: str, mine: Tensor, slot: Tensor, other: Tensor, root: bool) -> list[Move]:
    a, b, c, d = mine
    moves: dict[str, list[Move]] = {
        "all_reduce": [(slot, b), (a, a, other), (slot, a), (b, other)],
        "all_gather": [(slot, a), (c, a), (d, other)],
        "reduce_scatter": [(slot, b), (c, a, other)],
        "broadcast": [(slot, a), (slot, b)] if root else [(a, other), (b, other)],
        "all_to_all": [(slot, b), (c, a), (d, other)],
    }
    return moves[op]
