"""all_reduce, vary and invariant; all_gather and reduce_scatter, each the other's adjoint.

The objective is the sum over ranks of the ranks' losses. Under this convention, the adjoint of a
sum over ranks is the sum of the cotangents. A value that is equal on all ranks, and used in the
same way on each, already has its full cotangent on every rank. `vary` converts from such values,
and `all_reduce(..., invariant=True)` converts to them.

The backward of max, min and product applies the adjoint of the sum to the cotangent, and multiplies
by the derivative with respect to this rank's tensor. For max and min, this is 1 over the number of
ranks that tie; for a product, it is the product of the other ranks' tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Unpack, overload

import torch
from torch import Tensor
from torch.autograd import Function
from torch.distributed import ProcessGroup

from gradwire._digest import digest
from gradwire._torch import nested_forward_mode
from gradwire.collectives import consistency, wire
from gradwire.collectives.all_to_all_permute import AllToAll
from gradwire.collectives.consistency import (
    CallSignature,
    CheckContext,
    gather_signature,
    tensor_fields,
    unchecked,
)
from gradwire.collectives.operation import (
    Async,
    Handle,
    Operation,
    Peers,
    Plan,
    Sync,
    compiling,
    concat,
    divided,
    graph_is_needed,
    register_plan,
    unstack,
)
from gradwire.collectives.validation import (
    Op,
    Sizes,
    check_dense,
    move_back,
    move_to_front,
    piece_sizes,
    pieces_of,
    reduction_of,
    refuse_split,
    resolve_group,
    resolve_sizes,
    sizes_of_split,
)
from gradwire.errors import ArgumentError


class ReductionPlan(Plan):
    """Plan of a collective that reduces."""

    op: str

    @property
    def nonlinear(self) -> bool:
        return self.op not in ("sum", "avg")

    def full_result(self, y: Tensor) -> Tensor:
        """Return the reduction over all ranks on every rank, given this rank's result."""
        return self.adjoint().apply(y, unchecked)

    def apply(self, x: Tensor, context: CheckContext) -> Tensor:
        if not self.nonlinear or compiling(x):
            return super().apply(x, context)
        if self._differentiable(x) and (
            torch._C._are_functorch_transforms_active() or graph_is_needed(x)
        ):
            return _Nonlinear.apply(x, self, context)[0]  # type: ignore[no-any-return, no-untyped-call]
        return self.start(x, blocking=True).wait()

    def apply_async(self, x: Tensor, context: CheckContext) -> Handle[Tensor]:
        if self.nonlinear and not self._differentiable(x):
            refuse_split(x)
            return Handle(self.start(x).wait, self.name)
        return super().apply_async(x, context)

    def _differentiable(self, x: Tensor) -> bool:
        return self.op not in wire.BITWISE and (x.is_floating_point() or x.is_complex())

    def kept(self, y: Tensor) -> Tensor | None:
        # A copy, as the caller may modify the result.
        return y.clone() if self.op in ("max", "min") else None

    def derivative(self, x: Tensor, y: Tensor | None) -> Tensor:
        group = self.group
        if self.op == "product":
            return _product_of_others(x, group)  # not y / x: x may be 0
        # Ranks that tie share the derivative equally, as ties within torch.amax do.
        assert y is not None
        x, y = x.detach(), self.full_result(y.detach())
        ties = (x == y) | x.isnan()
        # Count in uint8 if possible: a quarter of the bytes of float32.
        small = torch.uint8 if group.size() < 256 else torch.int32
        counts = AllReduce(group).apply(ties.to(small), unchecked)
        return ties.to(x.dtype) / counts.to(x.dtype)


@register_plan
@dataclass(frozen=True)
class AllReduce(ReductionPlan):
    """Reduction on every rank; a sum or average is its own adjoint."""

    op: str = "sum"
    name = "all_reduce"

    def start(self, x: Tensor, blocking: bool = False) -> wire.Pending:
        return wire.all_reduce(x, self.op, self.group, blocking)

    def full_result(self, y: Tensor) -> Tensor:
        return y

    def adjoint(self) -> AllReduce:
        return AllReduce(self.group) if self.nonlinear else self


def _product_of_others(x: Tensor, group: ProcessGroup) -> Tensor:
    """Return the product of the other ranks' tensors; exact if some elements are zero."""
    # An all_to_all gives each rank all ranks' values of 1/W of the elements, and another returns
    # the products: no temporary is larger than the tensor.
    world, flat = group.size(), x.reshape(-1)
    to_shards = from_shards = AllToAll(group)
    if flat.shape[0] % world:
        sizes = wire.split_sizes(flat.shape[0], world)
        mine = (sizes[group.rank()],) * world
        to_shards, from_shards = AllToAll(group, sizes, mine), AllToAll(group, mine, sizes)
    pieces = to_shards.apply(flat, unchecked)
    pieces = pieces.reshape(world, pieces.shape[0] // world)
    products = _products_before(pieces) * _products_before(pieces.flip(0)).flip(0)
    return from_shards.apply(products.reshape(-1), unchecked).reshape(x.shape)


def _products_before(pieces: Tensor) -> Tensor:
    """Return, in row r, the product of all rows before r."""
    first = torch.ones_like(pieces[0])
    if len(pieces) == 1:
        # The result of a group of one rank stays connected to the graph, so that backward reaches
        # earlier collectives, in which other ranks may wait.
        first = first + pieces[:0].sum(0, dtype=pieces.dtype)
    rows = [first]
    for piece in pieces[:-1]:
        rows.append(rows[-1] * piece)
    return torch.stack(rows)


class _Nonlinear(Function):
    """Reduce by max, min or product: to the result, and what backward needs of it."""

    @staticmethod
    def forward(x: Tensor, plan: ReductionPlan, context: CheckContext) -> Any:
        y = plan.start(x, blocking=True).wait()
        kept = plan.kept(y)
        return y, y.new_empty(0) if kept is None else kept

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, ctx.plan, ctx.check = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(x, output[1])
        ctx.save_for_forward(x, output[1])

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor, _: Any) -> Any:
        total = ctx.plan.apply_adjoint(cotangent, ctx.check)
        return total * ctx.plan.derivative(*ctx.saved_tensors).conj(), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Any:
        with nested_forward_mode():
            x, y = (wire.without_tangent(saved) for saved in ctx.saved_tensors)
            local = tangent * ctx.plan.derivative(x, y)
            return replace(ctx.plan, op="sum").apply(local, ctx.check), None

    @staticmethod
    def vmap(_: Any, in_dims: Any, x: Tensor, plan: ReductionPlan, context: Any) -> Any:
        outputs = _Nonlinear.apply(x.movedim(in_dims[0], -1), plan, context)  # type: ignore[no-untyped-call]
        return outputs, (-1, None if plan.op == "product" else -1)


@register_plan
@dataclass(frozen=True)
class Invariant(Plan):
    """Sum or average that all ranks use in the same way, so that backward sends nothing."""

    average: bool = False
    name = "psum_invariant"

    def start(self, x: Tensor, blocking: bool = False) -> wire.Pending:
        return wire.all_reduce(x, "avg" if self.average else "sum", self.group, blocking)

    def adjoint(self) -> Vary:
        return Vary(self.group, self.average)


@register_plan
@dataclass(frozen=True)
class Vary(Plan):
    """Identity on a value that is equal on all ranks, and used differently on each."""

    average: bool = False
    name = "vary"

    def start(self, x: Tensor, blocking: bool = False) -> wire.Pending:
        return divided(self, wire.done(wire.contiguous_copy(x)))

    def adjoint(self) -> Invariant:
        return Invariant(self.group, self.average)


@overload
def all_reduce(
    x: Tensor, op: Op = ..., *, invariant: bool = ..., **options: Unpack[Sync]
) -> Tensor: ...
@overload
def all_reduce(
    x: Tensor, op: Op = ..., *, invariant: bool = ..., **options: Unpack[Async]
) -> Handle[Tensor]: ...
def all_reduce(
    x: Tensor,
    op: Op = "sum",
    *,
    group: ProcessGroup | None = None,
    invariant: bool = False,
    async_op: bool = False,
    check: bool | None = None,
) -> Any:
    """Reduce the tensors of all ranks, on every rank.

    Args:
        x: Tensor of the same shape on all ranks, with any strides. Floating-point and complex
            dtypes are differentiable; integers and booleans can be reduced too.
        op: "sum", "avg", "max", "min", "product", "band", "bor", "bxor", torch.distributed's
            ReduceOp of that name. NaN propagates.
        group: Process group; the default group if None.
        invariant: True if every rank uses the result in the same way, so that each already has the
            full cotangent. Backward then sends nothing. For sum and avg only.
        async_op: True to return a `Handle`.
        check: True to compare the call with the other ranks first; see `checks`.

    Returns:
        The reduction: same shape and dtype as `x`, the same bits on all ranks.

    Adjoint: for sum and avg, the same reduction of the cotangents. For max and min, the summed
    cotangent, shared equally by the ranks that tie. For product, the summed cotangent times the
    (conjugate) product of the other ranks' values.

    Raises:
        ArgumentError: The op is not defined for the dtype, or this rank is not in the group.
        MismatchError: With checks on, the ranks disagree.

    Example:
        The objective is the sum of the ranks' losses, so the cotangents of both ranks are summed.

        >>> from gradwire.collectives import all_reduce
        >>> def main():
        ...     x = torch.tensor([dist.get_rank() + 1.0], requires_grad=True)  # [1.], [2.]
        ...     y = all_reduce(x)  # [3.], [3.]
        ...     y.sum().backward()
        ...     return y.item(), x.grad.item()
        >>> run_ranks(main, world_size=2)
        [(3.0, 2.0), (3.0, 2.0)]
    """
    group = resolve_group(group)
    reduction = reduction_of(x, op)
    if invariant and reduction not in ("sum", "avg"):
        raise ArgumentError(f"invariant=True with op={op!r}: use it with sum or avg only")
    plan: Plan = AllReduce(group, reduction)
    if invariant:
        plan = Invariant(group, reduction == "avg")
    detail = "invariant" if invariant else ""
    return Operation(
        x,
        group,
        lambda: CallSignature("all_reduce", *tensor_fields(x), reduce=reduction, detail=detail),
        lambda x, peers: plan,
    ).run(check, async_op)


def vary(x: Tensor, *, group: ProcessGroup | None = None, check: bool | None = None) -> Tensor:
    """Copy a value that is equal on all ranks, to be used differently by each.

    In tensor parallelism, call this before the column-parallel layer, and
    `all_reduce(..., invariant=True)` after the row-parallel one.

    Args:
        x: Tensor with the same values on all ranks. Floating-point or complex.
        group: Process group; the default group if None.
        check: True to compare backward with the other ranks; see `checks`.

    Adjoint: the sum of the ranks' cotangents, on every rank.

    Example:
        >>> from gradwire.collectives import vary
        >>> def main():
        ...     x = torch.ones(1, requires_grad=True)
        ...     (vary(x) * (dist.get_rank() + 1)).sum().backward()
        ...     return x.grad  # 1 + 2
        >>> run_ranks(main, world_size=2)
        [tensor([3.]), tensor([3.])]
    """
    group = resolve_group(group)
    check_dense(x)
    context: CheckContext = unchecked
    if consistency.requested(check):
        x, context, _ = consistency.agree(group, x, CallSignature("vary", *tensor_fields(x)))
    return Vary(group).apply(x, context)


def invariant(x: Tensor, *, group: ProcessGroup | None = None, check: bool | None = None) -> Tensor:
    """Assert that a value is equal on all ranks, and used in the same way; return a copy of it.

    Nothing is sent in either pass. With checks on, the ranks verify the assertion by comparing a
    hash of the values.

    Args:
        x: Tensor with the same values on all ranks, of any dtype.
        group: Process group; the default group if None.
        check: True to verify the assertion; see `checks`.

    Adjoint: the identity. Every rank's cotangent is taken to be the full one.

    Raises:
        MismatchError: With checks on, the values differ.
    """
    group = resolve_group(group)
    check_dense(x)
    if consistency.requested(check):
        call = CallSignature(
            "invariant", *tensor_fields(x), detail=digest([wire.dense(x)]).hex()[:16]
        )
        consistency.agree(group, x, call)
    return x.clone(memory_format=torch.contiguous_format)


@register_plan
@dataclass(frozen=True)
class AllGather(Plan):
    """Concatenation of all ranks' rows, on every rank."""

    sizes: tuple[int, ...] | None = None
    average: bool = False
    name = "all_gather"

    def start(self, x: Tensor, blocking: bool = False) -> wire.Pending:
        return divided(self, wire.all_gather(x, self.sizes, self.group, blocking))

    def adjoint(self) -> ReduceScatter:
        return ReduceScatter(self.group, self.sizes, "avg" if self.average else "sum")

    def rows(self, rows: int) -> int:
        return rows * self.group.size() if self.sizes is None else sum(self.sizes)


@register_plan
@dataclass(frozen=True)
class ReduceScatter(ReductionPlan):
    """Reduction over ranks, scattered by rows."""

    sizes: tuple[int, ...] | None = None
    op: str = "sum"
    name = "reduce_scatter"

    def start(self, x: Tensor, blocking: bool = False) -> wire.Pending:
        return wire.reduce_scatter(x, self.sizes, self.op, self.group, blocking)

    def adjoint(self) -> AllGather:
        return AllGather(self.group, self.sizes, self.op == "avg")

    def rows(self, rows: int) -> int:
        return rows // self.group.size() if self.sizes is None else self.sizes[self.group.rank()]


@overload
def all_gather(
    x: Tensor, dim: int = ..., *, sizes: Sizes = ..., stack: bool = ..., **options: Unpack[Sync]
) -> Tensor: ...
@overload
def all_gather(
    x: Tensor, dim: int = ..., *, sizes: Sizes = ..., stack: bool = ..., **options: Unpack[Async]
) -> Handle[Tensor]: ...
def all_gather(
    x: Tensor,
    dim: int = 0,
    *,
    sizes: Sizes = None,
    stack: bool = False,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    check: bool | None = None,
) -> Any:
    """Concatenate the tensors of all ranks along a dim, on every rank.

    Args:
        x: Tensor of any dtype and strides. Its shape is the same on all ranks, except in `dim` if
            `sizes` is given. A 0-d tensor counts as one of size 1.
        dim: Dim along which to concatenate.
        sizes: Sizes of all ranks in `dim`, the same list on every rank; "find" to exchange them
            first; None if they are equal.
        stack: True to concatenate along a new dim, inserted before `dim`.
        group: Process group; the default group if None.
        async_op: True to return a `Handle`.
        check: True to compare the call with the other ranks first; see `checks`.

    Returns:
        The concatenation in rank order, contiguous.

    Adjoint: reduce_scatter of the cotangents, one collective of the result's size.

    Raises:
        ArgumentError: The sizes are wrong, or the tensor does not have the dim.
        MismatchError: With checks on, the ranks disagree.

    Example:
        >>> from gradwire.collectives import all_gather
        >>> def main():
        ...     rank = dist.get_rank()
        ...     return all_gather(torch.full((rank + 1,), rank), sizes="find")
        >>> run_ranks(main, world_size=2)  # rank 0 has [0], rank 1 has [1, 1]
        [tensor([0, 1, 1]), tensor([0, 1, 1])]
    """
    front, dim = move_to_front(x, dim, stack)
    group = resolve_group(group)
    return Operation(
        front,
        group,
        lambda: gather_signature("all_gather", front, sizes, f"dim={dim}", group),
        lambda front, peers: AllGather(group, resolve_sizes(sizes, front.shape[0], group)),
        (lambda _, y: move_back(y, dim)) if dim else None,
    ).run(check, async_op)


@overload
def reduce_scatter(
    x: Tensor | Sequence[Tensor],
    op: Op = ...,
    dim: int = ...,
    *,
    sizes: Sequence[int] | None = ...,
    **options: Unpack[Sync],
) -> Tensor: ...
@overload
def reduce_scatter(
    x: Tensor | Sequence[Tensor],
    op: Op = ...,
    dim: int = ...,
    *,
    sizes: Sequence[int] | None = ...,
    **options: Unpack[Async],
) -> Handle[Tensor]: ...
def reduce_scatter(
    x: Tensor | Sequence[Tensor],
    op: Op = "sum",
    dim: int = 0,
    *,
    sizes: Sequence[int] | None = None,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    check: bool | None = None,
) -> Any:
    """Reduce the tensors of all ranks, and scatter the result along a dim.

    Args:
        x: Tensor of the same shape on all ranks, with any strides; or a list of W tensors, whose
            sizes differ in `dim` only.
        op: Reduction, as in `all_reduce`.
        dim: Dim to split.
        sizes: Sizes of the pieces in `dim`; None for equal ones, or for those of a list.
        group: Process group; the default group if None.
        async_op: True to return a `Handle`.
        check: True to compare the call with the other ranks first; see `checks`.

    Returns:
        This rank's piece of the reduction.

    Adjoint: all_gather of the cotangents, then the op's rule as in `all_reduce`.

    Raises:
        ArgumentError: The tensor cannot be split this way, or the op is not defined for the dtype.
        MismatchError: With checks on, the ranks disagree.

    Example:
        >>> from gradwire.collectives import reduce_scatter
        >>> def main():
        ...     return reduce_scatter(torch.tensor([1.0, 2.0]) * (dist.get_rank() + 1))
        >>> run_ranks(main, world_size=2)  # of [1, 2] + [2, 4]
        [tensor([3.]), tensor([6.])]
    """
    group = resolve_group(group)
    scalars = False
    if not isinstance(x, Tensor):
        pieces, dim, scalars = pieces_of(x, dim, group, "x")
        sizes = piece_sizes(pieces, dim, sizes, group)
        x = concat(pieces, dim)
    reduction = reduction_of(x, op)
    front, dim = move_to_front(x, dim)
    split = sizes_of_split(sizes, front, dim, group, names=("sizes", "x"))
    known = None if sizes is None or len(set(split)) == 1 else split
    return Operation(
        front,
        group,
        lambda: CallSignature(
            "reduce_scatter",
            *tensor_fields(front),
            reduce=reduction,
            detail=f"dim={dim}, sizes={known}",
        ),
        lambda x, peers: ReduceScatter(group, known, reduction),
        lambda _, y: y.reshape(()) if scalars else move_back(y, dim),
    ).run(check, async_op)


@overload
def all_gather_list(
    x: Tensor, *, sizes: Sizes = ..., **options: Unpack[Sync]
) -> tuple[Tensor, ...]: ...
@overload
def all_gather_list(
    x: Tensor, *, sizes: Sizes = ..., **options: Unpack[Async]
) -> Handle[tuple[Tensor, ...]]: ...
def all_gather_list(
    x: Tensor,
    *,
    sizes: Sizes = None,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    check: bool | None = None,
) -> Any:
    """Gather the tensors of all ranks on every rank, as separate tensors.

    Args:
        x: Tensor of any dtype. Its shape is the same on all ranks, except in the first dim if
            `sizes` is given. A 0-d tensor counts as one of size 1; the results are then 0-d.
        sizes: Sizes in the first dim, as in `all_gather`.
        group: Process group; the default group if None.
        async_op: True to return a `Handle`.
        check: True to compare the call with the other ranks first; see `checks`.

    Returns:
        A tuple of the ranks' tensors, in rank order. They share one block of memory: `clone()`
        those that are kept or saved.

    Adjoint: on rank r, the sum over all ranks of the cotangents of entry r.

    Raises:
        ArgumentError: The sizes are wrong.
        MismatchError: With checks on, the ranks disagree.

    Example:
        >>> from gradwire.collectives import all_gather_list
        >>> def main():
        ...     return all_gather_list(torch.tensor(dist.get_rank() + 1.0))
        >>> run_ranks(main, world_size=2)
        [(tensor(1.), tensor(2.)), (tensor(1.), tensor(2.))]
    """
    check_dense(x)
    group = resolve_group(group)
    scalars = not x.dim()
    front = x.reshape(1) if scalars else x
    kind = "list of 0-d tensors" if scalars else "list"

    def plan_of(front: Tensor, peers: Peers) -> AllGather:
        known = resolve_sizes(sizes, front.shape[0], group)
        if scalars and known is not None and set(known) != {1}:
            raise ArgumentError(f"sizes is {list(known)}: x is 0-d, which counts as size 1")
        return AllGather(group, known)

    return Operation(
        front,
        group,
        lambda: gather_signature("all_gather", front, sizes, kind, group),
        plan_of,
        lambda plan, y: unstack(y, plan.sizes or (len(front),) * group.size(), scalars),
    ).run(check, async_op)
