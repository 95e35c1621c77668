"""How many rows each rank has: given, equal, or found by an all_gather of one integer a rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torch import Tensor
from torch.distributed import ProcessGroup

from gradwire.collectives.args.validation import check_dense
from gradwire.collectives.wire.movement import gather_ints
from gradwire.errors import ArgumentError, ArgumentTypeError

Sizes = Sequence[int] | Literal["find"] | None
"""Rows of each rank; "find" asks the ranks; None says that all have the same number."""

KnownSizes = tuple[int, ...] | None
"""Rows of each rank; None where all have the same number."""


def resolve_sizes(sizes: Sizes, rows: int, group: ProcessGroup) -> KnownSizes:
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
        return tuple(count for (count,) in gather_ints([rows], group))
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


def sizes_text(sizes: Sizes) -> str:
    """The sizes as text that ranks compare: the same for a list and a tuple."""
    return f"sizes={list(sizes) if isinstance(sizes, list | tuple) else sizes}"


def equal_sizes(rows: int, group: ProcessGroup, what: str) -> tuple[int, ...]:
    """The same number of rows for each rank.

    Raises:
        ArgumentError: The number of ranks does not divide them.
    """
    if rows % group.size():
        raise ArgumentError(
            f"{what} has size {rows} in the dim that is split: {group.size()} does not divide it; "
            "give the sizes"
        )
    return (rows // group.size(),) * group.size()


def sizes_of_split(
    sizes: Sequence[int] | None, x: Tensor, dim: int, group: ProcessGroup, *, names: tuple[str, str]
) -> tuple[int, ...]:
    """The sizes into which the rows of `x` are split: equal ones, if none are given.

    Args:
        sizes: As the caller gave them.
        x: With the dim that is split in front.
        dim: Where that was.
        group: The group.
        names: What the caller calls the sizes and the tensor.

    Raises:
        ArgumentError: They do not add up to the rows, or these cannot be split equally.
    """
    name, x_name = names
    if sizes is None:
        return equal_sizes(x.shape[0], group, x_name)
    given = valid_sizes(sizes, group, name)
    if sum(given) != x.shape[0]:
        raise ArgumentError(f"{name} is {list(given)}: {x_name} has {x.shape[0]} in dim {dim}")
    return given


def valid_dim(dim: int, dims: int, shape: Sequence[int]) -> int:
    """The dim, from 0 on.

    Raises:
        ArgumentError: There is none.
    """
    if not -dims <= dim < dims:
        raise ArgumentError(f"dim is {dim}: the tensor has shape {tuple(shape)}")
    return dim % dims


def move_to_front(x: Tensor, dim: int, stack: bool = False) -> tuple[Tensor, int]:
    """The tensor with a dim moved to the front, and that dim from 0 on; 0-d tensors become (1,).

    With `stack`, a new dim of size 1, before that dim.

    Raises:
        ArgumentError: There is no such dim.
    """
    check_dense(x)
    if stack:
        x = x.unsqueeze(valid_dim(dim, x.dim() + 1, x.shape))
    elif not x.dim():
        x = x.reshape(1)
    dim = valid_dim(dim, x.dim(), x.shape)
    return (x.movedim(dim, 0) if dim else x), dim


def move_back(x: Tensor, dim: int) -> Tensor:
    """The inverse of `move_to_front`, contiguous."""
    return x.movedim(0, dim).contiguous() if dim else x


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
