"""Sizes per rank, dims, and lists with one tensor for each rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torch import Tensor
from torch.distributed import ProcessGroup

from gradwire.collectives.args.validation import check_dense
from gradwire.collectives.wire.movement import gather_ints
from gradwire.errors import ArgumentError, ArgumentTypeError

Sizes = Sequence[int] | Literal["find"] | None
"""Number of rows of each rank; "find" gathers them; None if all ranks have the same number."""

KnownSizes = tuple[int, ...] | None
"""Number of rows of each rank; None if all ranks have the same number."""


def resolve_sizes(sizes: Sizes, rows: int, group: ProcessGroup) -> KnownSizes:
    """Return the ranks' sizes, or None if all are equal.

    Args:
        sizes: Argument of the public function.
        rows: Number of rows on this rank.
        group: Process group.

    Raises:
        ArgumentError: There is not one size for each rank, or this rank's size is wrong.
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
            f"sizes is {list(given)}: the tensor of rank {group.rank()} of the group has size "
            f"{rows}; give every rank's size"
        )
    return given


def valid_sizes(sizes: Sequence[int], group: ProcessGroup, name: str) -> tuple[int, ...]:
    """Return the sizes as a tuple, after checking that there is one for each rank.

    Raises:
        ArgumentTypeError: The sizes are not numbers.
        ArgumentError: There is not one size ≥ 0 for each rank.
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
    """Return the sizes as text for ranks to compare, the same for a list and a tuple."""
    return f"sizes={list(sizes) if isinstance(sizes, list | tuple) else sizes}"


def equal_sizes(rows: int, group: ProcessGroup, what: str) -> tuple[int, ...]:
    """Return an equal number of rows for each rank.

    Raises:
        ArgumentError: The number of rows is not divisible by the number of ranks.
    """
    if rows % group.size():
        raise ArgumentError(
            f"{what} has size {rows} in the dim that is split, which is not divisible by the "
            f"number of ranks, {group.size()}: give the sizes"
        )
    return (rows // group.size(),) * group.size()


def sizes_of_split(
    sizes: Sequence[int] | None, x: Tensor, dim: int, group: ProcessGroup, *, names: tuple[str, str]
) -> tuple[int, ...]:
    """Return the sizes into which the rows of `x` are split; equal ones by default.

    Args:
        sizes: Argument of the public function.
        x: Tensor, with the split dim in front.
        dim: Original position of the split dim.
        group: Process group.
        names: Names of the sizes and of the tensor, for error messages.

    Raises:
        ArgumentError: The sizes do not sum to the number of rows, or the rows cannot be split
            equally.
    """
    name, x_name = names
    if sizes is None:
        return equal_sizes(x.shape[0], group, x_name)
    given = valid_sizes(sizes, group, name)
    if sum(given) != x.shape[0]:
        raise ArgumentError(f"{name} is {list(given)}: {x_name} has {x.shape[0]} in dim {dim}")
    return given


def valid_dim(dim: int, dims: int, shape: Sequence[int]) -> int:
    """Return the dim as a non-negative index.

    Raises:
        ArgumentError: The tensor does not have this dim.
    """
    if not -dims <= dim < dims:
        raise ArgumentError(f"dim is {dim}: the tensor has shape {tuple(shape)}")
    return dim % dims


def move_to_front(x: Tensor, dim: int, stack: bool = False) -> tuple[Tensor, int]:
    """Move a dim to the front; return the tensor and the dim as a non-negative index.

    A 0-d tensor becomes one of shape (1,). With `stack`, a new dim of size 1 is inserted before
    `dim`, and moved to the front.

    Raises:
        ArgumentError: The tensor does not have this dim.
    """
    check_dense(x)
    if stack:
        x = x.unsqueeze(valid_dim(dim, x.dim() + 1, x.shape))
    elif not x.dim():
        x = x.reshape(1)
    dim = valid_dim(dim, x.dim(), x.shape)
    return (x.movedim(dim, 0) if dim else x), dim


def move_back(x: Tensor, dim: int) -> Tensor:
    """Undo `move_to_front`; the result is contiguous."""
    return x.movedim(0, dim).contiguous() if dim else x


def pieces_of(
    xs: object, dim: int, group: ProcessGroup, name: str
) -> tuple[list[Tensor], int, bool]:
    """Validate a list with one tensor for each rank, whose sizes differ in at most one dim.

    Returns:
        The tensors; the dim as a non-negative index; and True if the tensors were 0-d, in which
        case they now have shape (1,).

    Raises:
        ArgumentTypeError: `xs` is not a list of tensors.
        ArgumentError: There is not one tensor for each rank, their shapes, dtypes or devices
            do not match, or they do not have the dim.
    """
    if not isinstance(xs, Sequence) or isinstance(xs, str):
        raise ArgumentTypeError(
            f"{name} is a {type(xs).__name__}: give a tensor, or a list with one for each rank"
        )
    if len(xs) != group.size():
        raise ArgumentError(
            f"{name} has {len(xs)} tensors: give one for each of {group.size()} ranks"
        )
    for i, x in enumerate(xs):
        check_dense(x, f"{name}[{i}]")
    first = xs[0]
    scalars = not first.dim()
    dim = valid_dim(dim, max(1, first.dim()), first.shape)
    for i, x in enumerate(xs):
        if x.dtype != first.dtype or x.device != first.device:
            raise ArgumentError(
                f"{name}[{i}] is {x.dtype} on {x.device}, {name}[0] is {first.dtype} on "
                f"{first.device}: give all tensors one dtype and device"
            )
        if x.dim() != first.dim() or any(
            a != b for d, (a, b) in enumerate(zip(x.shape, first.shape, strict=True)) if d != dim
        ):
            raise ArgumentError(
                f"{name}[{i}] has shape {tuple(x.shape)}, {name}[0] has {tuple(first.shape)}: "
                f"shapes may differ in dim {dim} only"
            )
    return [x.reshape(1) if scalars else x for x in xs], dim, scalars


def piece_sizes(
    pieces: Sequence[Tensor], dim: int, sizes: Sequence[int] | None, group: ProcessGroup
) -> tuple[int, ...]:
    """Return the sizes of a list's tensors in a dim.

    Raises:
        ArgumentError: `sizes` is given, and differs.
    """
    own = tuple(piece.shape[dim] for piece in pieces)
    if sizes is not None and valid_sizes(sizes, group, "sizes") != own:
        raise ArgumentError(
            f"sizes is {list(sizes)}: the tensors have sizes {list(own)} in dim {dim}; omit sizes"
        )
    return own
