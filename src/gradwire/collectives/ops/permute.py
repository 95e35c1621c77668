"""ppermute and shift, whose adjoint goes the other way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, overload

from torch import Tensor
from torch.distributed import ProcessGroup

from gradwire.collectives.args.options import Async, Sync
from gradwire.collectives.args.ranks import resolve_group
from gradwire.collectives.args.tensors import check_dense
from gradwire.collectives.autograd.handles import Handle, apply_or_start
from gradwire.collectives.checks import consistency
from gradwire.collectives.checks.call_signature import CallSignature
from gradwire.collectives.ops.checked import run_checked
from gradwire.collectives.ops.plans import Permute
from gradwire.errors import ArgumentError, ArgumentTypeError

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["ppermute", "shift"]


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
