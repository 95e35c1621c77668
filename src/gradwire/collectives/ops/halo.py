"""halo_exchange: each rank's slab with the neighbours' edges around it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from gradwire.collectives.args.ranks import resolve_group
from gradwire.collectives.args.sizes import valid_dim
from gradwire.collectives.args.tensors import check_dense
from gradwire.collectives.checks import consistency
from gradwire.collectives.checks.call_signature import CallSignature
from gradwire.collectives.ops.permute import shift
from gradwire.errors import ArgumentError, ArgumentTypeError

__all__ = ["halo_exchange"]


def halo_exchange(
    x: Tensor,
    widths: int | tuple[int, int],
    dim: int = 0,
    *,
    wrap: bool = False,
    group: ProcessGroup | None = None,
    check: bool | None = None,
) -> Tensor:
    """This rank's slab, padded with the edges of its neighbours' slabs.

    Args:
        x: The ranks' slabs lie in rank order along `dim`; their sizes there may differ, but are at
            least the widths.
        widths: How much to take from the neighbour before and from the one after, or one number
            for both; the same on all ranks.
        dim: The dim along which the slabs lie.
        wrap: Whether the first and the last rank are neighbours; otherwise zeros stand there.
        group: The default group, if None.
        check: Compare with the other ranks first; see `checks`.

    Returns:
        The slab, larger by both widths in `dim`.

    Adjoint: the cotangents of the edges are added to those of their owners.

    Raises:
        ArgumentTypeError: Widths that are not one number or two.
        ArgumentError: A width below 0, or above the slab's size; with checks on, any rank's.
        MismatchError: With checks on, ranks disagree.

    Example:
        >>> from gradwire.collectives import halo_exchange
        >>> def main():
        ...     x = torch.tensor([1.0, 2.0]) + 10 * dist.get_rank()
        ...     return halo_exchange(x, 1).tolist()
        >>> run_ranks(main, world_size=2)
        [[0.0, 1.0, 2.0, 11.0], [2.0, 11.0, 12.0, 0.0]]
    """
    group = resolve_group(group)
    check_dense(x)
    dim = valid_dim(dim, x.dim(), x.shape)
    before, after = _width_pair(widths)
    size = x.shape[dim]
    sizes = {group.rank(): size}
    if consistency.enabled(check):
        call = CallSignature(
            "halo_exchange",
            *consistency.tensor_fields(x.movedim(dim, 0)),
            detail=f"widths={(before, after)}, dim={dim}, wrap={wrap}",
            ragged=True,
        )
        x, _, rows = consistency.agree(group, x, call)
        sizes |= {rank: row.shape[0] for rank, row in enumerate(rows) if row.shape}
    for rank, its_size in sizes.items():
        if max(before, after) > its_size:
            raise ArgumentError(
                f"widths is {widths}: x has size {its_size} in dim {dim} on rank {rank} of the "
                "group; give widths that all slabs have"
            )
    options: dict[str, Any] = {"wrap": wrap, "group": group, "check": check}
    parts = [x]
    if before:
        parts.insert(0, shift(x.narrow(dim, size - before, before), 1, **options))
    if after:
        parts.append(shift(x.narrow(dim, 0, after), -1, **options))
    return torch.cat(parts, dim)


def _width_pair(widths: object) -> tuple[int, int]:
    """The width before and the one after.

    Raises:
        ArgumentTypeError: They are not one number or two.
        ArgumentError: One is below 0.
    """
    pair = (widths, widths) if isinstance(widths, int) else widths
    match pair:
        case (int(before), int(after)):
            if min(before, after) < 0:
                raise ArgumentError(f"widths is {widths}: give numbers ≥ 0")
            return before, after
    raise ArgumentTypeError(f"widths is {widths!r}: give one number, or two in a tuple")
