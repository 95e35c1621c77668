"""ppermute and shift, whose adjoint goes the other way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from gradwire.collectives.args.sizes import valid_dim
from gradwire.collectives.args.validation import check_dense, resolve_group
from gradwire.collectives.autograd.handles import Async, Handle, Sync, apply_or_start
from gradwire.collectives.checks import consistency
from gradwire.collectives.checks.call_signature import CallSignature
from gradwire.collectives.ops.checked import run_checked
from gradwire.collectives.ops.plans import Permute
from gradwire.errors import ArgumentError, ArgumentTypeError

if TYPE_CHECKING:
    from typing_extensions import Unpack


@overload
def ppermute(x: Tensor, pairs: Sequence[tuple[int, int]], **options: Unpack[Sync]) -> Tensor: ...
@overload
def ppermute(
    x: Tensor, pairs: Sequence[tuple[int, int]], **options: Unpack[Async]
) -> Handle[Tensor]: ...
def ppermute(
    x: Tensor,
    pairs: Sequence[tuple[int, int]],
    *,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    check: bool | None = None,
) -> Any:
    """Each rank's tensor to another rank, as (source, destination) pairs say.

    Args:
        x: The same shape on all ranks, any dtype and strides.
        pairs: Ranks in the group, the same pairs on all ranks; no source and no destination twice.
        group: The default group, if None.
        async_op: Return a `Handle`.
        check: Compare with the other ranks first; see `checks`.

    Returns:
        The source's tensor; zeros on a rank that is no destination.

    Adjoint: the inverse pairs.

    Raises:
        ArgumentTypeError: They are no pairs.
        ArgumentError: A source or destination twice, or not in the group.
        MismatchError: With checks on, ranks disagree.

    Example:
        >>> from gradwire.collectives import ppermute
        >>> def main():
        ...     return ppermute(torch.tensor([dist.get_rank() + 1.0]), [(0, 1)])
        >>> run_ranks(main, world_size=2)
        [tensor([0.]), tensor([1.])]
    """
    group = resolve_group(group)
    try:
        moves = tuple((int(source), int(target)) for source, target in pairs)
    except (TypeError, ValueError) as error:
        raise ArgumentTypeError(
            f"pairs is {pairs!r}: give a list of (source, destination), ranks in the group"
        ) from error
    _check_pairs(moves, group.size())
    return _permuted(x, moves, "ppermute", group, async_op, check)


@overload
def shift(x: Tensor, k: int = ..., *, wrap: bool = ..., **options: Unpack[Sync]) -> Tensor: ...
@overload
def shift(
    x: Tensor, k: int = ..., *, wrap: bool = ..., **options: Unpack[Async]
) -> Handle[Tensor]: ...
def shift(
    x: Tensor,
    k: int = 1,
    *,
    wrap: bool = True,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    check: bool | None = None,
) -> Any:
    """Each rank's tensor to the rank k places further.

    Args:
        x: The same shape on all ranks, any dtype and strides.
        k: How far; negative for the other direction.
        wrap: Whether the last rank's next is the first; otherwise zeros come in there.
        group: The default group, if None.
        async_op: Return a `Handle`.
        check: Compare with the other ranks first; see `checks`.

    Returns:
        The tensor of the rank k places before.

    Adjoint: the shift by -k.

    Raises:
        ArgumentTypeError: k is no whole number.
        MismatchError: With checks on, ranks disagree.

    Example:
        >>> from gradwire.collectives import shift
        >>> def main():
        ...     x = torch.tensor([dist.get_rank() + 1.0])
        ...     return shift(x).item(), shift(x, wrap=False).item()
        >>> run_ranks(main, world_size=3)
        [(3.0, 0.0), (1.0, 1.0), (2.0, 2.0)]
    """
    group = resolve_group(group)
    if not isinstance(k, int):
        raise ArgumentTypeError(f"k is {k!r}: give a whole number")
    world = group.size()
    moves = [(rank, (rank + k) % world) for rank in range(world) if wrap or 0 <= rank + k < world]
    return _permuted(x, tuple(moves), "shift", group, async_op, check)


def _permuted(
    x: Tensor,
    moves: tuple[tuple[int, int], ...],
    name: str,
    group: ProcessGroup,
    async_op: bool,
    check: bool | None,
) -> Any:
    check_dense(x)
    return run_checked(
        group,
        x,
        check,
        lambda: CallSignature(name, *consistency.tensor_fields(x), detail=f"pairs={moves}"),
        lambda x, context: apply_or_start(Permute(group, moves), x, context, async_op),
    )


def _check_pairs(pairs: Sequence[tuple[int, int]], world: int) -> None:
    for name, ranks in (("source", [s for s, _ in pairs]), ("destination", [t for _, t in pairs])):
        if len(set(ranks)) < len(ranks):
            raise ArgumentError(f"pairs is {list(pairs)}: a {name} is there twice")
        if any(not 0 <= rank < world for rank in ranks):
            raise ArgumentError(
                f"pairs is {list(pairs)}: a {name} is not in the group, 0 to {world - 1}"
            )


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
