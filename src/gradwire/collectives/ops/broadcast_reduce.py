"""broadcast and reduce: each is the other's adjoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, overload

from torch import Tensor
from torch.distributed import ProcessGroup

from gradwire.collectives import consistency, wire
from gradwire.collectives.arguments import (
    check_dense,
    check_has_data,
    refuse_in_transforms,
    resolve_group,
    root_of,
)
from gradwire.collectives.consistency import CheckContext, Refusal, tensor_fields
from gradwire.collectives.handles import Async, Handle, Sync
from gradwire.collectives.linear_collective import LinearCollective, divided, register_plan
from gradwire.collectives.operation import Operation
from gradwire.collectives.ops.reductions import ReductionCollective, reduce_with
from gradwire.collectives.reduce_ops import Op, reduction_of
from gradwire.collectives.signature import CallSignature
from gradwire.errors import ArgumentError, ArgumentTypeError

if TYPE_CHECKING:
    from typing_extensions import Unpack


@register_plan
@dataclass(frozen=True)
class Broadcast(LinearCollective):
    """Root's tensor on every rank; inputs of other ranks are not read."""

    root: int
    average: bool = False
    name = "broadcast"

    def start(self, x: Tensor, blocking: bool = False) -> wire.Pending:
        return divided(self, wire.broadcast(x, self.root, self.group, blocking))

    def adjoint(self) -> Reduce:
        return Reduce(self.group, self.root, self.average)


@register_plan
@dataclass(frozen=True)
class Reduce(ReductionCollective):
    """Sum or average on the root, zeros on other ranks."""

    root: int
    average: bool = False
    name = "reduce"

    def start_reduction(self, x: Tensor, op: str, blocking: bool = False) -> wire.Pending:
        return wire.reduce(x, self.root, op, self.group, blocking)

    def adjoint(self) -> Broadcast:
        return Broadcast(self.group, self.root, self.average)


@overload
def reduce(
    x: Tensor,
    dst: int | None = ...,
    op: Op = ...,
    *,
    group_dst: int | None = ...,
    **options: Unpack[Sync],
) -> Tensor: ...
@overload
def reduce(
    x: Tensor,
    dst: int | None = ...,
    op: Op = ...,
    *,
    group_dst: int | None = ...,
    **options: Unpack[Async],
) -> Handle[Tensor]: ...
def reduce(
    x: Tensor,
    dst: int | None = None,
    op: Op = "sum",
    *,
    group_dst: int | None = None,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    check: bool | None = None,
) -> Any:
    """Reduce the tensors of all ranks on one rank; the others get zeros.

    Args:
        x: Tensor of the same shape on all ranks, with any strides.
        dst: Root's global rank.
        op: Reduction, as in `all_reduce`.
        group_dst: Root's rank in the group, instead of `dst`.
        group: Process group; the default group if None.
        async_op: True to return a `Handle`.
        check: True to compare the call with the other ranks first; see `checks`.

    Returns:
        A tensor of the shape and dtype of `x` on every rank. The loss must depend on it on every
        rank, for instance by its sum: the backward of the zeros takes part in the adjoint.

    Adjoint: broadcast of the root's cotangent, then the op's rule as in `all_reduce`. Cotangents
    of other ranks are ignored, because their results are constant.

    Raises:
        ArgumentError: Neither or both of `dst` and `group_dst` are given, or the op is not defined
            for the dtype.
        MismatchError: With checks on, the ranks disagree.

    Example:
        >>> from gradwire.collectives import reduce
        >>> def main():
        ...     return reduce(torch.tensor([dist.get_rank() + 1.0]), dst=0)
        >>> run_ranks(main, world_size=2)
        [tensor([3.]), tensor([0.])]
    """
    group = resolve_group(group)
    root = root_of(group, dst, group_dst, "dst")
    reduction = reduction_of(x, op)
    plan = reduce_with(reduction, Reduce(group, root, reduction == "avg"))
    operation = Operation(
        x,
        group,
        lambda: CallSignature("reduce", *tensor_fields(x), reduce=reduction, root=root),
        lambda x, peers: plan,
    )
    return operation.run(check, async_op)


@overload
def broadcast(
    x: Tensor | Sequence[int] | None,
    src: int | None = ...,
    *,
    group_src: int | None = ...,
    **options: Unpack[Sync],
) -> Tensor: ...
@overload
def broadcast(
    x: Tensor | Sequence[int] | None,
    src: int | None = ...,
    *,
    group_src: int | None = ...,
    **options: Unpack[Async],
) -> Handle[Tensor]: ...
def broadcast(
    x: Tensor | Sequence[int] | None,
    src: int | None = None,
    *,
    group_src: int | None = None,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    check: bool | None = None,
) -> Any:
    """Broadcast one rank's tensor to all ranks.

    Args:
        x: On the root, the tensor to send: any shape, dtype and strides. On other ranks, a tensor
            of the same shape, dtype and device, which must require a gradient if the root's does;
            its values are not read, and its gradient is zero. A tensor on "meta" stands for one on
            the group's device. With checks on, other ranks may pass the shape or None, and receive
            the rest from the root.
        src: Root's global rank.
        group_src: Root's rank in the group, instead of `src`.
        group: Process group; the default group if None.
        async_op: True to return a `Handle`.
        check: True to compare the call with the other ranks first; see `checks`.

    Returns:
        A new tensor with the root's values on every rank, including the root.

    Adjoint: the sum of the ranks' cotangents on the root, zeros elsewhere.

    Raises:
        ArgumentError: Neither or both of `src` and `group_src` are given, or a receiver has no
            tensor and checks are off.
        MismatchError: With checks on, the ranks disagree.
            NotSupportedError: A receiver has no tensor, or one on "meta", inside a `torch.func`
            transform.

    Example:
        >>> from gradwire.collectives import broadcast
        >>> def main():
        ...     x = torch.tensor([5.0]) if dist.get_rank() == 0 else None
        ...     return broadcast(x, src=0, check=True)
        >>> run_ranks(main, world_size=2)
        [tensor([5.]), tensor([5.])]
    """
    group = resolve_group(group)
    root = root_of(group, src, group_src, "src")
    requested = consistency.requested(check)
    given: Tensor | Sequence[int] | Refusal | None
    try:
        given = _tensor_or_shape(x, group.rank() == root, bool(requested))
    except (ArgumentError, ArgumentTypeError) as error:
        if not requested or group.rank() != root:
            raise
        given = Refusal(type(error), str(error))
    plan = Broadcast(group, root)
    if requested:
        y, context = _agree(given, root, group)
        y = _off_meta(y, group)
        return plan.apply_async(y, context) if async_op else plan.apply(y, context)
    assert isinstance(given, Tensor)
    operation = Operation(
        _off_meta(given, group),
        group,
        lambda: CallSignature("broadcast", *tensor_fields(given), root=root),
        lambda x, peers: plan,
    )
    return operation.run(requested, async_op)


def _agree(
    x: Tensor | Sequence[int] | Refusal | None, root: int, group: ProcessGroup
) -> tuple[Tensor, CheckContext]:
    """Compare the call; return the tensor to broadcast, a placeholder if this rank has none."""
    own = x if isinstance(x, Tensor) else None
    refusal = x if isinstance(x, Refusal) else None
    if own is not None:
        call = CallSignature("broadcast", *tensor_fields(own), root=root)
    else:
        shape = None if x is None or isinstance(x, Refusal) else tuple(x)
        call = CallSignature("broadcast", shape, None, consistency.grad_mode(), root=root)
    y, context, _ = consistency.agree_with_root(group, own, call, root, refusal)
    return y, context


def _off_meta(x: Tensor, group: ProcessGroup) -> Tensor:
    """Return the tensor; for one on "meta", a placeholder on a device that the group supports."""
    if not x.is_meta:
        return x
    refuse_in_transforms("x on meta", "give a tensor with the same transforms as the root's")
    return wire.placeholder(x.shape, x.dtype, x.requires_grad, group)


def _tensor_or_shape(x: object, at_root: bool, checked: bool) -> Tensor | Sequence[int] | None:
    """Return the tensor, or a receiver's shape or None, if they are allowed."""
    if isinstance(x, Tensor):
        check_dense(x)
        if at_root:
            check_has_data(x, "x")
        return x
    if at_root:
        raise ArgumentTypeError(f"x is a {type(x).__name__} on the root: give the tensor to send")
    if not checked:
        raise ArgumentError(
            f"x is {x!r} on a receiver, and checks are off: give a tensor of the root's shape and "
            "dtype (torch.empty(..., device='meta') will do), or check=True on every rank, so that "
            "the root sends them"
        )
    if x is None:
        return None
    if not isinstance(x, Sequence):
        raise ArgumentTypeError(f"x is a {type(x).__name__}: give a tensor, a shape or None")
    return x
