"""Plans that reduce: sums and averages, which are linear, and max, min and product.

The backward of a nonlinear reduction applies the adjoint of the sum to the cotangent, and
multiplies by the derivative with respect to this rank's tensor. For max and min, this is 1 over the
number of ranks that tie; for a product, it is the product of the other ranks' tensors.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, Unpack, overload

import torch
from torch import Tensor
from torch.autograd import Function
from torch.distributed import ProcessGroup

from gradwire._digest import digest
from gradwire._torch import nested_forward_mode
from gradwire.collectives import consistency, wire
from gradwire.collectives.all_to_all_permute import AllToAll
from gradwire.collectives.backends import Pending, contiguous_copy, dense, done, without_tangent
from gradwire.collectives.consistency import UNCHECKED, CallSignature, CheckContext, tensor_fields
from gradwire.collectives.operation import (
    Async,
    AsyncState,
    Handle,
    LinearCollective,
    Operation,
    Plan,
    Sync,
    compiling,
    decode_plan,
    divided,
    graph_is_needed,
    handle_of_token,
    register_plan,
    result_like,
)
from gradwire.collectives.validation import (
    BITWISE,
    Op,
    check_dense,
    reduction_of,
    refuse_split,
    resolve_group,
)
from gradwire.errors import ArgumentError


class ReductionCollective(LinearCollective):
    """Plan of a collective that sums or averages, and supports other reductions."""

    average: bool

    def start(self, x: Tensor, blocking: bool = False) -> Pending:
        """Start the sum or the average."""
        return self.start_reduction(x, "avg" if self.average else "sum", blocking)

    @abstractmethod
    def start_reduction(self, x: Tensor, op: str, blocking: bool = False) -> Pending:
        """Start with another reduction."""

    def full_result(self, y: Tensor) -> Tensor:
        """Return the reduction over all ranks on every rank, given this rank's result."""
        return self.adjoint().apply(y, UNCHECKED)


@register_plan
@dataclass(frozen=True)
class AllReduce(ReductionCollective):
    """Sum or average, on every rank: its own adjoint."""

    average: bool = False
    name = "all_reduce"

    def start_reduction(self, x: Tensor, op: str, blocking: bool = False) -> Pending:
        return wire.all_reduce(x, op, self.group, blocking)

    def full_result(self, y: Tensor) -> Tensor:
        return y

    def adjoint(self) -> AllReduce:
        return self


def reduce_with(op: str, plan: ReductionCollective) -> Plan:
    """Return the plan of any reduction; sum and avg are the given plan's own."""
    return plan if op in ("sum", "avg") else NonlinearReduction(plan, op)


@dataclass(frozen=True)
class NonlinearReduction:
    """Plan of a reduction other than sum and avg.

    Args:
        linear: Plan of the sum.
        op: Name of the reduction.
    """

    linear: ReductionCollective
    op: str

    def start(self, x: Tensor, blocking: bool = False) -> Pending:
        """Start, without gradients."""
        return self.linear.start_reduction(x, self.op, blocking)

    def apply(self, x: Tensor, context: CheckContext) -> Tensor:
        """Run the reduction, differentiably in every mode."""
        if not self._differentiable(x):
            return self.start(x, blocking=True).wait()
        if compiling(x):
            plan = self.linear
            y: Tensor = _reduced(x, plan.name, plan.as_ints(), self.op, plan.group.group_name)
            return y
        if torch._C._are_functorch_transforms_active() or graph_is_needed(x):
            return _Reduction.apply(x, self, context)[0]  # type: ignore[no-any-return, no-untyped-call]
        return self.start(x, blocking=True).wait()

    def apply_async(self, x: Tensor, context: CheckContext) -> Handle[Tensor]:
        """Start the reduction; return a handle of its result, differentiable if `x` is."""
        refuse_split(x)
        if not self._differentiable(x) or not graph_is_needed(x):
            return Handle(self.start(x).wait, self.linear.name)
        state = AsyncState()
        token = _Start.apply(x, self, state, context)  # type: ignore[no-untyped-call]
        return handle_of_token(token, self.linear, state, context)

    def _differentiable(self, x: Tensor) -> bool:
        return self.op not in BITWISE and (x.is_floating_point() or x.is_complex())

    def saved(self, y: Tensor) -> Tensor:
        """Return what backward needs of a result: a copy, as the caller may modify the result."""
        return y.new_empty(0) if self.op == "product" else y.clone()

    def derivative(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the derivative of the result `y` with respect to this rank's tensor."""
        group = self.linear.group
        if self.op == "product":
            return _product_of_others(x, group)  # not y / x: x may be 0
        # Ranks that tie share the derivative equally, as ties within torch.amax do.
        x, y = x.detach(), self.linear.full_result(y.detach())
        ties = (x == y) | x.isnan()
        # Count in uint8 if possible: a quarter of the bytes of float32.
        small = torch.uint8 if group.size() < 256 else torch.int32
        counts = AllReduce(group).apply(ties.to(small), UNCHECKED)
        return ties.to(x.dtype) / counts.to(x.dtype)


def _product_of_others(x: Tensor, group: ProcessGroup) -> Tensor:
    """Return the product of the other ranks' tensors; exact if some elements are zero.

    An all_to_all gives each rank all ranks' values of 1/W of the elements, and another returns the
    products: no temporary is larger than the tensor.
    """
    world, flat = group.size(), x.reshape(-1)
    to_shards = from_shards = AllToAll(group)
    if flat.shape[0] % world:
        sizes = wire.split_sizes(flat.shape[0], world)
        mine = (sizes[group.rank()],) * world
        to_shards, from_shards = AllToAll(group, sizes, mine), AllToAll(group, mine, sizes)
    pieces = to_shards.apply(flat, UNCHECKED)
    pieces = pieces.reshape(world, pieces.shape[0] // world)
    products = _products_before(pieces) * _products_before(pieces.flip(0)).flip(0)
    return from_shards.apply(products.reshape(-1), UNCHECKED).reshape(x.shape)


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


class _Reduction(Function):
    """Reduce: from the tensor to the result, and a copy of it for backward."""

    @staticmethod
    def forward(x: Tensor, plan: NonlinearReduction, context: CheckContext) -> Any:
        y = plan.start(x, blocking=True).wait()
        return y, plan.saved(y)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, ctx.plan, ctx.check = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(x, output[1])
        ctx.save_for_forward(x, output[1])

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor, _: Any) -> Any:
        with ctx.check.backward(cotangent):
            total = ctx.plan.linear.adjoint().apply(cotangent, ctx.check)
        return total * ctx.plan.derivative(*ctx.saved_tensors).conj(), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Any:
        with nested_forward_mode():
            x, y = (without_tangent(saved) for saved in ctx.saved_tensors)
            local = tangent * ctx.plan.derivative(x, y)
            return ctx.plan.linear.apply(local, ctx.check), None

    @staticmethod
    def vmap(_: Any, in_dims: Any, x: Tensor, plan: NonlinearReduction, context: Any) -> Any:
        outputs = _Reduction.apply(x.movedim(in_dims[0], -1), plan, context)  # type: ignore[no-untyped-call]
        return outputs, (-1, None if plan.op == "product" else -1)


class _Start(Function):
    """Start an asynchronous reduction; the wait is in `linear_collective`."""

    @staticmethod
    def forward(
        x: Tensor, plan: NonlinearReduction, state: AsyncState, context: CheckContext
    ) -> Tensor:
        pending = plan.start(x)

        def finish() -> Tensor:
            y = pending.wait()
            state.result = plan.saved(y)
            return y

        state.pending = Pending((), finish)
        return x.new_zeros(())

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, ctx.plan, ctx.state, ctx.check = inputs
        ctx.save_for_backward(x)

    @staticmethod
    def backward(ctx: Any, token: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        total = ctx.state.wait_adjoint(token, ctx.plan.linear.adjoint(), ctx.check)
        return total * ctx.plan.derivative(x, ctx.state.result).conj(), None, None, None


# --- compiled graphs ---


_SCHEMA = "(Tensor x, str name, int[] ints, str op, str group) -> Tensor"


@torch.library.custom_op("gradwire::reduced", mutates_args=(), schema=_SCHEMA)
def _reduced(x: Tensor, name: str, ints: list[int], op: str, group: str) -> Tensor:
    return _decode(name, ints, op, group).start(x, blocking=True).wait()


@_reduced.register_fake
def _fake_reduced(x: Tensor, name: str, ints: list[int], op: str, group: str) -> Tensor:
    return result_like(x, decode_plan(name, ints, group))


def _save_reduced(ctx: Any, inputs: Any, output: Any) -> None:
    x, *ctx.encoded = inputs
    ctx.save_for_backward(x, output)


def _backward_reduced(ctx: Any, cotangent: Tensor) -> Any:
    plan = _decode(*ctx.encoded)
    total = plan.linear.adjoint().apply(cotangent, UNCHECKED)
    return total * plan.derivative(*ctx.saved_tensors).conj(), None, None, None, None


def _decode(name: str, ints: list[int], op: str, group: str) -> NonlinearReduction:
    linear = decode_plan(name, ints, group)
    assert isinstance(linear, ReductionCollective)
    return NonlinearReduction(linear, op)


_reduced.register_autograd(_backward_reduced, setup_context=_save_reduced)


@register_plan
@dataclass(frozen=True)
class Invariant(LinearCollective):
    """Sum or average that all ranks use in the same way, so that backward sends nothing."""

    average: bool = False
    name = "psum_invariant"

    def start(self, x: Tensor, blocking: bool = False) -> Pending:
        return wire.all_reduce(x, "avg" if self.average else "sum", self.group, blocking)

    def adjoint(self) -> Vary:
        return Vary(self.group, self.average)


@register_plan
@dataclass(frozen=True)
class Vary(LinearCollective):
    """Identity on a value that is equal on all ranks, and used differently on each."""

    average: bool = False
    name = "vary"

    def start(self, x: Tensor, blocking: bool = False) -> Pending:
        return divided(self, done(contiguous_copy(x)))

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
    average = reduction == "avg"
    plan: Plan
    if invariant:
        plan = Invariant(group, average)
    else:
        plan = reduce_with(reduction, AllReduce(group, average))
    detail = "invariant" if invariant else ""
    operation = Operation(
        x,
        group,
        lambda: CallSignature("all_reduce", *tensor_fields(x), reduce=reduction, detail=detail),
        lambda x, peers: plan,
    )
    return operation.run(check, async_op)


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
    context = consistency.UNCHECKED
    if consistency.enabled(check):
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
    if consistency.enabled(check):
        consistency.agree(
            group,
            x,
            CallSignature("invariant", *tensor_fields(x), detail=digest([dense(x)]).hex()[:16]),
        )
    return x.clone(memory_format=torch.contiguous_format)
