"""How many rows each rank has: given, equal, or found by an exchange of one number a rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torch import Tensor
from torch.distributed import ProcessGroup

from gradwire.collectives.args.ranks import dense_tensor
from gradwire.collectives.wire.ints import gather_numbers
from gradwire.errors import ArgumentError, ArgumentTypeError

__all__ = [
    "Sizes",
    "dim_back",
    "dim_in_front",
    "equal_part",
    "resolve_sizes",
    "sizes_in_words",
    "valid_dim",
    "valid_sizes",
]

Sizes = Sequence[int] | Literal["find"] | None
"""Rows of each rank; "find" asks the ranks; None says that all have the same number."""


def resolve_sizes(sizes: Sizes, rows: int, group: ProcessGroup) -> tuple[int, ...] | None:
    """The ranks' sizes; None where all are equal.

    Args:
        sizes: As the caller gave them.
        rows: How many this rank has.
        group: The group.

    Raises:
        ArgumentError: Not a size for each rank, or this rank's is another.
    """
    if sizes is None:
        return None
    if isinstance(sizes, str):
        if sizes != "find":
            raise ArgumentError(f'sizes is {sizes!r}: give a size for each rank, "find" or None')
        return tuple(count for (count,) in gather_numbers([rows], group))
    given = valid_sizes(sizes, group, "sizes")
    if given[group.rank()] != rows:
        raise ArgumentError(
            f"sizes is {list(given)}: this is rank {group.rank()} of the group, and its tensor has "
            f"{rows} there"
        )
    return given


def valid_sizes(sizes: Sequence[int], group: ProcessGroup, name: str) -> tuple[int, ...]:
    """The sizes, if there is one for each rank.

    Raises:
        ArgumentTypeError: They are no numbers.
        ArgumentError: There is not.
    """
    try:
        given = tuple(int(size) for size in sizes)
    except (TypeError, ValueError) as error:
        raise ArgumentTypeError(
            f"{name} is {sizes!r}: give a list with a size for each of {group.size()} ranks"
        ) from error
    if len(given) != group.size() or min(given) < 0:
        raise ArgumentError(
            f"{name} is {list(given)}: give one size ≥ 0 for each of {group.size()} ranks"
        )
    return given


def sizes_in_words(sizes: Sizes) -> str:
    """The sizes as ranks compare them: the same for a list and a tuple."""
    return f"sizes={list(sizes) if isinstance(sizes, list | tuple) else sizes}"


def equal_part(rows: int, group: ProcessGroup, what: str) -> int:
    """A rank's share of rows that are dealt out equally.

    Raises:
        ArgumentError: They cannot be.
    """
    if rows % group.size():
        raise ArgumentError(
            f"{what} has size {rows} in the dim that is cut: {group.size()} does not divide it; "
            "give the sizes"
        )
    return rows // group.size()


def valid_dim(dim: int, dims: int, shape: Sequence[int]) -> int:
    """The dim, from 0 on.

    Raises:
        ArgumentError: There is none.
    """
    if not -dims <= dim < dims:
        raise ArgumentError(f"dim is {dim}: the tensor has shape {tuple(shape)}")
    return dim % dims


def dim_in_front(x: Tensor, dim: int) -> tuple[Tensor, int]:
    """The tensor with a dim moved to the front, and that dim from 0 on; a number has one dim.

    Raises:
        ArgumentError: There is no such dim.
    """
    dense_tensor(x)
    if not x.dim():
        x = x.reshape(1)
    dim = valid_dim(dim, x.dim(), x.shape)
    return (x.movedim(dim, 0) if dim else x), dim


def dim_back(x: Tensor, dim: int) -> Tensor:
    """The inverse of `dim_in_front`, contiguous."""
    return x.movedim(0, dim).contiguous() if dim else x
