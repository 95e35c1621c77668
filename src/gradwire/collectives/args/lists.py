"""A list with a tensor for each rank, validated before anything is sent."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.distributed import ProcessGroup

from gradwire.collectives.args.sizes import valid_dim, valid_sizes
from gradwire.collectives.args.tensors import check_dense
from gradwire.errors import ArgumentError, ArgumentTypeError

__all__ = ["piece_sizes", "pieces_of"]


def pieces_of(
    xs: object, dim: int, group: ProcessGroup, name: str
) -> tuple[list[Tensor], int, bool]:
    """A list's tensors, one for each rank, which differ at most in one dim.

    Returns:
        The tensors, that dim from 0 on, and whether they were 0-d; those have shape (1,) here.

    Raises:
        ArgumentTypeError: Not a list of tensors.
        ArgumentError: Not one for each rank, not alike, or without such a dim.
    """
    if not isinstance(xs, Sequence) or isinstance(xs, str):
        raise ArgumentTypeError(
            f"{name} is a {type(xs).__name__}: give a tensor, or a list with one for each rank"
        )
    if len(xs) != group.size():
        raise ArgumentError(
            f"{name} has {len(xs)} pieces: give one for each of {group.size()} ranks"
        )
    for i, x in enumerate(xs):
        check_dense(x, f"{name}[{i}]")
    first = xs[0]
    scalars = not first.dim()
    dim = valid_dim(dim, max(1, first.dim()), first.shape)
    for i, x in enumerate(xs):
        if x.dtype != first.dtype or x.device != first.device:
            raise ArgumentError(
                f"{name}[{i}] is {x.dtype} on {x.device}, {name}[0] {first.dtype} on "
                f"{first.device}: give the same for all"
            )
        if x.dim() != first.dim() or any(
            a != b for d, (a, b) in enumerate(zip(x.shape, first.shape, strict=True)) if d != dim
        ):
            raise ArgumentError(
                f"{name}[{i}] has shape {tuple(x.shape)}, {name}[0] {tuple(first.shape)}: they may "
                f"differ in dim {dim} only"
            )
    return [x.reshape(1) if scalars else x for x in xs], dim, scalars


def piece_sizes(
    pieces: Sequence[Tensor], dim: int, sizes: Sequence[int] | None, group: ProcessGroup
) -> tuple[int, ...]:
    """The sizes of a list's tensors in a dim.

    Raises:
        ArgumentError: Others are given.
    """
    own = tuple(piece.shape[dim] for piece in pieces)
    if sizes is not None and valid_sizes(sizes, group, "sizes") != own:
        raise ArgumentError(
            f"sizes is {list(sizes)}: the pieces have {list(own)} in dim {dim}; leave sizes out"
        )
    return own
