"""Plans that reduce: sums and averages, which are linear, and max, min and product.

The backward of a nonlinear reduction applies the adjoint of the sum to the cotangent, and
multiplies by the derivative with respect to this rank's tensor. For max and min, this is 1 over the
number of ranks that tie; for a product, it is the product of the other ranks' tensors.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.distributed import ProcessGroup

from gradwire._torch import nested_forward_mode
from gradwire.collectives import wire
from gradwire.collectives.arguments import refuse_split
from gradwire.collectives.autograd import compiling, graph_is_needed
from gradwire.collectives.consistency import UNCHECKED, CheckContext
from gradwire.collectives.handles import Handle
from gradwire.collectives.linear_collective import (
    AsyncState,
    LinearCollective,
    decode_plan,
    handle_of_token,
    register_plan,
    result_like,
)
from gradwire.collectives.operation import Plan
from gradwire.collectives.ops.all_to_all import AllToAll
from gradwire.collectives.reduce_ops import BITWISE


class ReductionCollective(LinearCollective):
    """Plan of a collective that sums or averages, and supports other reductions."""

    average: bool

    def start(self, x: Tensor, blocking: bool = False) -> wire.Pending:
        """Start the sum or the average."""
        return self.start_reduction(x, "avg" if self.average else "sum", blocking)

    @abstractmethod
    def start_reduction(self, x: Tensor, op: str, blocking: bool = False) -> wire.Pending:
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

    def start_reduction(self, x: Tensor, op: str, blocking: bool = False) -> wire.Pending:
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

    def start(self, x: Tensor, blocking: bool = False) -> wire.Pending:
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
            x, y = (wire.without_tangent(saved) for saved in ctx.saved_tensors)
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

        state.pending = wire.Pending((), finish)
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
