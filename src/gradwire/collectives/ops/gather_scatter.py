"""gather and scatter: each is the other's adjoint.

Only the root holds all rows. The other ranks have a tensor of any number of rows in its place, so
that the graph is the same on all: scatter does not read it, gather fills it with zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, overload

from torch import Tensor
from torch.distributed import ProcessGroup

from gradwire.collectives.args.sizes import (
    KnownSizes,
    Sizes,
    move_back,
    move_to_front,
    resolve_sizes,
)
from gradwire.collectives.args.validation import refuse_in_transforms, resolve_group, root_of
from gradwire.collectives.autograd.handles import Async, Handle, Sync, apply_or_start, then
from gradwire.collectives.checks import consistency
from gradwire.collectives.checks.consistency import CheckContext, Refusal
from gradwire.collectives.ops.all_gather_reduce_scatter import checked_gather
from gradwire.collectives.ops.plans import Gather, Scatter
from gradwire.collectives.ops.scatter_source import ScatterSource, agree_on_source
from gradwire.errors import ArgumentError, ArgumentTypeError

if TYPE_CHECKING:
    from typing_extensions import Unpack


@overload
def gather(
    x: Tensor,
    dst: int | None = ...,
    dim: int = ...,
    *,
    sizes: Sizes = ...,
    stack: bool = ...,
    group_dst: int | None = ...,
    **options: Unpack[Sync],
) -> Tensor: ...
@overload
def gather(
    x: Tensor,
    dst: int | None = ...,
    dim: int = ...,
    *,
    sizes: Sizes = ...,
    stack: bool = ...,
    group_dst: int | None = ...,
    **options: Unpack[Async],
) -> Handle[Tensor]: ...
def gather(
    x: Tensor,
    dst: int | None = None,
    dim: int = 0,
    *,
    sizes: Sizes = None,
    stack: bool = False,
    group_dst: int | None = None,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    check: bool | None = None,
) -> Any:
    """All ranks' tensors concatenated along a dim, on one rank; zeros on the others.

    Args:
        x: As in `all_gather`.
        dst: The root's global rank.
        dim: The dim along which they are concatenated.
        sizes: As in `all_gather`.
        stack: Concatenate along a new dim instead, before `dim`.
        group_dst: The root's rank in the group, instead of `dst`.
        group: The default group, if None.
        async_op: Return a `Handle`.
        check: Compare with the other ranks first; see `checks`.

    Returns:
        On the root the concatenation in rank order; zeros of that shape on the others, to be used
        there in what backward is called on.

    Adjoint: scatter of the root's cotangent; cotangents of the other ranks are ignored.

    Raises:
        ArgumentError: No root or two, sizes that are not the ranks', or no such dim.
        MismatchError: With checks on, ranks disagree.

    Example:
        >>> from gradwire.collectives import gather
        >>> def main():
        ...     return gather(torch.tensor([dist.get_rank() + 1.0]), dst=0)
        >>> run_ranks(main, world_size=2)
        [tensor([1., 2.]), tensor([0., 0.])]
    """
    group = resolve_group(group)
    root = root_of(group, dst, group_dst, "dst")
    front, dim = move_to_front(x, dim, stack)

    def start(known: KnownSizes, front: Tensor, context: CheckContext) -> Any:
        known = known or (front.shape[0],) * group.size()
        return apply_or_start(Gather(group, root, known, sum(known)), front, context, async_op)

    gathered = checked_gather("gather", front, sizes, f"dim={dim}", group, check, start, root)
    return then(gathered, lambda y: move_back(y, dim))


@overload
def scatter(
    xs: Tensor | Sequence[Tensor] | None,
    src: int | None = ...,
    dim: int = ...,
    *,
    sizes: Sequence[int] | None = ...,
    like: Tensor | None = ...,
    group_src: int | None = ...,
    **options: Unpack[Sync],
) -> Tensor: ...
@overload
def scatter(
    xs: Tensor | Sequence[Tensor] | None,
    src: int | None = ...,
    dim: int = ...,
    *,
    sizes: Sequence[int] | None = ...,
    like: Tensor | None = ...,
    group_src: int | None = ...,
    **options: Unpack[Async],
) -> Handle[Tensor]: ...
def scatter(
    xs: Tensor | Sequence[Tensor] | None,
    src: int | None = None,
    dim: int = 0,
    *,
    sizes: Sequence[int] | None = None,
    like: Tensor | None = None,
    group_src: int | None = None,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    check: bool | None = None,
) -> Any:
    """One rank's tensor, split along a dim, or its list of tensors: to each rank its piece.

    Args:
        xs: On the root a list with a tensor for each rank, which differ at most in `dim`, or one
            tensor that is split. On the other ranks None; tensors given there are not read; they
            get gradients of zeros, so that the rank takes part in further derivatives.
        src: The root's global rank.
        dim: The dim that is split.
        sizes: The sizes into which the root's tensor is split; None for equal ones. Those of the
            root are used; with `like`, every rank gives them.
        like: On every rank a tensor of the shape, dtype and device that it will receive (one on
            "meta" will do, for the group's device), which requires a gradient where the root's
            does. Then nothing is sent besides the data; without it the root first sends shape and
            sizes.
        group_src: The root's rank in the group, instead of `src`.
        group: The default group, if None.
        async_op: Return a `Handle`.
        check: Compare with the other ranks first; see `checks`.

    Returns:
        This rank's piece.

    Adjoint: gather of the cotangents on the root.

    Raises:
        ArgumentError: No root or two, or not a piece for each rank; on every rank with checks on or
            without `like`.
        MismatchError: Ranks disagree, with checks on or without `like`.
        NotSupportedError: Without `like`, or with one on "meta", inside torch.func's transforms.

    Example:
        >>> from gradwire.collectives import scatter
        >>> def main():
        ...     xs = [torch.tensor([1.0]), torch.tensor([2.0])] if dist.get_rank() == 0 else None
        ...     return scatter(xs, src=0)
        >>> run_ranks(main, world_size=2)
        [tensor([1.]), tensor([2.])]
    """
    group = resolve_group(group)
    root = root_of(group, src, group_src, "src")
    if like is None:
        refuse_in_transforms("scatter without like", "give it on every rank")
    exchanges = like is None or consistency.enabled(check)
    source: ScatterSource | Refusal | None = None
    if group.rank() == root:
        try:
            source = ScatterSource.on_root(xs, dim, sizes, group)
        except (ArgumentError, ArgumentTypeError) as error:
            if not exchanges:
                raise
            source = Refusal(type(error), str(error))
    elif like is not None:
        source = ScatterSource.from_like(like, dim, sizes, group)
    context = consistency.UNCHECKED
    if exchanges:
        source, context = agree_on_source(source, root, dim, group)
    assert isinstance(source, ScatterSource)
    if not exchanges and group.rank() != root:
        resolve_sizes(source.sizes, source.expected_rows, group)
    if group.rank() != root and like is None:
        source = source.attach_to(xs)
    op = Scatter(group, root, source.sizes, len(source.rows))
    result = apply_or_start(op, source.rows, context, async_op)
    return then(result, lambda y: y.reshape(()) if source.scalars else move_back(y, source.dim))
