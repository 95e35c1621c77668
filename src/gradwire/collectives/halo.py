"""halo_exchange: each rank's slab with the neighbours' edges around it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from gradwire.collectives.permute import shift
from gradwire.collectives.ranks import member
from gradwire.collectives.sizes import valid_dim
from gradwire.errors import ArgumentError

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
        dim: The dim along which the whole is cut.
        wrap: Whether the first and the last rank are neighbours; otherwise zeros stand there.
        group: The default group, if None.
        check: Compare with the other ranks first; see `checks`.

    Returns:
        The slab, larger by both widths in `dim`.

    Adjoint: the cotangents of the edges are added to those of their owners.

    Raises:
        ArgumentError: A width below 0 or above the slab's size.
        MismatchError: With checks on, ranks disagree.

    Example:
        >>> from gradwire.collectives import halo_exchange
        >>> def main():
        ...     x = torch.tensor([1.0, 2.0]) + 10 * dist.get_rank()
        ...     return halo_exchange(x, 1).tolist()
        >>> run_ranks(main, world_size=2)
        [[0.0, 1.0, 2.0, 11.0], [2.0, 11.0, 12.0, 0.0]]
    """
    group = member(group)
    dim = valid_dim(dim, x.dim(), x.shape)
    before, after = (widths, widths) if isinstance(widths, int) else widths
    size = x.shape[dim]
    if min(before, after) < 0 or max(before, after) > size:
        raise ArgumentError(f"widths is {widths}: x has size {size} in dim {dim}")
    options: dict[str, Any] = {"wrap": wrap, "group": group, "check": check}
    parts = [x]
    if before:
        parts.insert(0, shift(x.narrow(dim, size - before, before), 1, **options))
    if after:
        parts.append(shift(x.narrow(dim, 0, after), -1, **options))
    return torch.cat(parts, dim)
