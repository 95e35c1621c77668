"""ppermute, shift and halo_exchange, whose adjoints send in the opposite direction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, overload

from torch import Tensor
from torch.distributed import ProcessGroup

from gradwire.collectives import consistency, wire
from gradwire.collectives.arguments import check_dense, resolve_group, valid_dim
from gradwire.collectives.autograd import concat
from gradwire.collectives.consistency import tensor_fields
from gradwire.collectives.handles import Async, Handle, Sync
from gradwire.collectives.linear_collective import LinearCollective, register_plan
from gradwire.collectives.operation import Operation
from gradwire.collectives.signature import CallSignature
from gradwire.errors import ArgumentError, ArgumentTypeError

if TYPE_CHECKING:
    from typing_extensions import Unpack


@register_plan
@dataclass(frozen=True)
class Permute(LinearCollective):
    """Tensors sent along (source, destination) pairs; zeros on ranks that receive nothing."""

    pairs: tuple[tuple[int, int], ...]
    name = "ppermute"

    def start(self, x: Tensor, blocking: bool = False) -> wire.Pending:
        if x.numel() == 0:
            return wire.done(wire.contiguous_copy(x))
        rank, world = self.group.rank(), self.group.size()
        send, receive = [0] * world, [0] * world
        for source, destination in self.pairs:
            if source == rank:
                send[destination] = 1
            if destination == rank:
                receive[source] = 1
        row = x.unsqueeze(0)
        pending = wire.all_to_all(row[: sum(send)], send, receive, self.group, blocking)

        def finish() -> Tensor:
            rows = pending.wait()
            if len(rows):
                # `.data`, because a view could not be modified in place: autograd does not know its
                # base.
                return rows[0].data
            return wire.zeros_like(x)

        return wire.Pending((), finish)

    def adjoint(self) -> Permute:
        pairs = tuple((destination, source) for source, destination in self.pairs)
        return Permute(self.group, pairs)


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
    """Send tensors between ranks according to (source, destination) pairs.

    Args:
        x: Tensor of the same shape on all ranks, of any dtype and strides.
        pairs: Pairs of ranks in the group, the same on every rank. No source and no destination may
            occur twice.
        group: Process group; the default group if None.
        async_op: True to return a `Handle`.
        check: True to compare the call with the other ranks first; see `checks`.

    Returns:
        The source's tensor; zeros on a rank that is not a destination.

    Adjoint: the inverse pairs.

    Raises:
        ArgumentTypeError: `pairs` is not a list of pairs.
        ArgumentError: A source or destination occurs twice, or is not in the group.
        MismatchError: With checks on, the ranks disagree.

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
    """Send each rank's tensor to the rank whose index is larger by k.

    Args:
        x: Tensor of the same shape on all ranks, of any dtype and strides.
        k: Number of ranks by which to shift; may be negative.
        wrap: True if the first rank follows the last; otherwise zeros are shifted in.
        group: Process group; the default group if None.
        async_op: True to return a `Handle`.
        check: True to compare the call with the other ranks first; see `checks`.

    Returns:
        The tensor of the rank whose index is smaller by k.

    Adjoint: the shift by -k.

    Raises:
        ArgumentTypeError: k is not an int.
        MismatchError: With checks on, the ranks disagree.

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
        raise ArgumentTypeError(f"k is {k!r}: give an int")
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
    plan = Permute(group, moves)
    operation = Operation(
        x,
        group,
        lambda: CallSignature(name, *tensor_fields(x), detail=f"pairs={moves}"),
        lambda x, peers: plan,
    )
    return operation.run(check, async_op)


def _check_pairs(pairs: Sequence[tuple[int, int]], world: int) -> None:
    for name, ranks in (("source", [s for s, _ in pairs]), ("destination", [t for _, t in pairs])):
        if len(set(ranks)) < len(ranks):
            raise ArgumentError(f"pairs is {list(pairs)}: a {name} occurs twice")
        if any(not 0 <= rank < world for rank in ranks):
            raise ArgumentError(
                f"pairs is {list(pairs)}: a {name} is not in the group; give ranks 0 to {world - 1}"
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
    """Pad this rank's slab with the edges of its neighbours' slabs.

    Args:
        x: Slab of this rank, of an array that is divided along `dim` in rank order. Sizes in `dim`
            may differ between ranks, but must be at least the widths.
        widths: Widths of the edges from the previous and the next rank, or one number for both; the
            same on every rank.
        dim: Dim along which the array is divided.
        wrap: True if the first and the last rank are neighbours; otherwise zeros are padded.
        group: Process group; the default group if None.
        check: True to compare the call with the other ranks first; see `checks`.

    Returns:
        The slab, enlarged by both widths in `dim`.

    Adjoint: the cotangents of the edges are added to those of the slabs that they came from.

    Raises:
        ArgumentTypeError: `widths` is not one number or two.
        ArgumentError: A width is negative or exceeds the slab's size; with checks on, the size of
            any rank's slab.
        MismatchError: With checks on, the ranks disagree.

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
            *tensor_fields(x.movedim(dim, 0)),
            detail=f"widths={(before, after)}, dim={dim}, wrap={wrap}",
            ragged=True,
        )
        x, _, rows = consistency.agree(group, x, call)
        sizes |= {rank: row.shape[0] for rank, row in enumerate(rows) if row.shape}
    for rank, its_size in sizes.items():
        if max(before, after) > its_size:
            raise ArgumentError(
                f"widths is {widths}: x has size {its_size} in dim {dim} on rank {rank} of the "
                "group; give widths that do not exceed any slab"
            )
    options: dict[str, Any] = {"wrap": wrap, "group": group, "check": check}
    parts = [x]
    if before:
        parts.insert(0, shift(x.narrow(dim, size - before, before), 1, **options))
    if after:
        parts.append(shift(x.narrow(dim, 0, after), -1, **options))
    return concat(parts, dim)


def _width_pair(widths: object) -> tuple[int, int]:
    """Return the widths before and after the slab.

    Raises:
        ArgumentTypeError: `widths` is not one number or two.
        ArgumentError: A width is negative.
    """
    pair = (widths, widths) if isinstance(widths, int) else widths
    match pair:
        case (int(before), int(after)):
            if min(before, after) < 0:
                raise ArgumentError(f"widths is {widths}: give numbers ≥ 0")
            return before, after
    raise ArgumentTypeError(f"widths is {widths!r}: give one int, or a tuple of two")
