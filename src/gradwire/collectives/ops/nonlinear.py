"""Nonlinear reductions: max, min and product.

Their backward applies the adjoint of the sum to the cotangent, and multiplies by the derivative
with respect to this rank's tensor. For max and min, this is 1 over the number of ranks that tie;
for a product, it is the product of the other ranks' tensors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from gradwire._torch import nested_forward_mode
from gradwire.collectives.args.reductions import BITWISE
from gradwire.collectives.args.validation import refuse_split
from gradwire.collectives.autograd.handles import (
    AsyncState,
    Handle,
    apply_or_start,
    handle_of_token,
)
from gradwire.collectives.autograd.linear_collective import (
    apply_linear,
    compiling,
    decode_plan,
    graph_is_needed,
    result_like,
)
from gradwire.collectives.checks.consistency import CheckContext
from gradwire.collectives.ops.plans import AllReduce, ReductionCollective
from gradwire.collectives.ops.prefix import exclusive_product
from gradwire.collectives.wire import Pending
from gradwire.collectives.wire.backends import without_tangent


def apply_reduction(
    plan: ReductionCollective, x: Tensor, op: str, context: CheckContext, async_op: bool
) -> Any:
    """Run or start a collective with any reduction; sum and avg are the plan's own.

    Returns:
        The result, or a handle of it.
    """
    if op in ("sum", "avg", "premul"):
        return apply_or_start(plan, x, context, async_op)
    differentiable = op not in BITWISE and (x.is_floating_point() or x.is_complex())
    if async_op:
        return _start_async(plan, x, op, context, differentiable)
    if differentiable and compiling(x):
        return _reduced(x, plan.name, plan.as_ints(), op, plan.group.group_name)
    if differentiable and (torch._C._are_functorch_transforms_active() or graph_is_needed(x)):
        return _Reduction.apply(x, plan, op, context)[0]  # type: ignore[no-untyped-call]
    return plan.start_reduction(x, op, blocking=True).wait()


def _start_async(
    plan: ReductionCollective, x: Tensor, op: str, context: CheckContext, differentiable: bool
) -> Handle[Tensor]:
    """Return a handle of the reduction, differentiable if the reduction is."""
    refuse_split(x)
    if not differentiable or not graph_is_needed(x):
        return Handle(plan.start_reduction(x, op).wait, plan.name)
    state = AsyncState()
    token = _Start.apply(x, plan, op, state, context)  # type: ignore[no-untyped-call]
    return handle_of_token(token, plan, state, context)


def _derivative(plan: ReductionCollective, op: str, x: Tensor, y: Tensor) -> Tensor:
    """Return the derivative of the result `y` with respect to this rank's tensor."""
    if op == "product":
        return exclusive_product(x, plan.group)  # not y / x: x may be 0
    # Ranks that tie share the derivative equally, as ties within torch.amax do.
    x, y = x.detach(), plan.full_result(y.detach())
    ties = (x == y) | x.isnan()
    # Count in uint8 if possible: a quarter of the bytes of float32.
    small = torch.uint8 if plan.group.size() < 256 else torch.int32
    counts = apply_linear(AllReduce(plan.group), ties.to(small))
    return ties.to(x.dtype) / counts.to(x.dtype)


def _saved(op: str, y: Tensor) -> Tensor:
    """Return what backward needs of a result: a copy, as the caller may modify the result."""
    return y.new_empty(0) if op == "product" else y.clone()


class _Reduction(Function):
    """Reduce: from the tensor to the result, and a copy of it for backward."""

    @staticmethod
    def forward(x: Tensor, plan: ReductionCollective, op: str, context: CheckContext) -> Any:
        y = plan.start_reduction(x, op, blocking=True).wait()
        return y, _saved(op, y)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, ctx.plan, ctx.op, ctx.check = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(x, output[1])
        ctx.save_for_forward(x, output[1])

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor, _: Any) -> Any:
        with ctx.check.backward(cotangent):
            total = apply_linear(ctx.plan.adjoint(), cotangent, ctx.check)
        return total * _derivative(ctx.plan, ctx.op, *ctx.saved_tensors).conj(), None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Any:
        with nested_forward_mode():
            x, y = (without_tangent(saved) for saved in ctx.saved_tensors)
            local = tangent * _derivative(ctx.plan, ctx.op, x, y)
            return apply_linear(ctx.plan, local, ctx.check), None

    @staticmethod
    def vmap(_: Any, in_dims: Any, x: Tensor, plan: Any, op: str, context: Any) -> Any:
        outputs = _Reduction.apply(x.movedim(in_dims[0], -1), plan, op, context)  # type: ignore[no-untyped-call]
        return outputs, (-1, None if op == "product" else -1)


class _Start(Function):
    """Start an asynchronous reduction; the wait is in `handles`."""

    @staticmethod
    def forward(
        x: Tensor, plan: ReductionCollective, op: str, state: AsyncState, context: CheckContext
    ) -> Tensor:
        pending = plan.start_reduction(x, op)

        def finish() -> Tensor:
            y = pending.wait()
            state.result = _saved(op, y)
            return y

        state.pending = Pending((), finish)
        return x.new_zeros(())

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, ctx.plan, ctx.op, ctx.state, ctx.check = inputs
        ctx.save_for_backward(x)

    @staticmethod
    def backward(ctx: Any, token: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        total = ctx.state.wait_adjoint(token, ctx.plan.adjoint(), ctx.check)
        derivative = _derivative(ctx.plan, ctx.op, x, ctx.state.result)
        return total * derivative.conj(), None, None, None, None


# --- compiled graphs ---


_SCHEMA = "(Tensor x, str name, int[] ints, str op, str group) -> Tensor"


@torch.library.custom_op("gradwire::reduced", mutates_args=(), schema=_SCHEMA)
def _reduced(x: Tensor, name: str, ints: list[int], op: str, group: str) -> Tensor:
    return _decode(name, ints, group).start_reduction(x, op, blocking=True).wait()


@_reduced.register_fake
def _fake_reduced(x: Tensor, name: str, ints: list[int], op: str, group: str) -> Tensor:
    return result_like(x, decode_plan(name, ints, group))


def _save_reduced(ctx: Any, inputs: Any, output: Any) -> None:
    x, ctx.name, ctx.ints, ctx.op, ctx.group = inputs
    ctx.save_for_backward(x, output)


def _backward_reduced(ctx: Any, cotangent: Tensor) -> Any:
    plan = _decode(ctx.name, ctx.ints, ctx.group)
    total = apply_linear(plan.adjoint(), cotangent)
    derivative = _derivative(plan, ctx.op, *ctx.saved_tensors)
    return total * derivative.conj(), None, None, None, None


def _decode(name: str, ints: list[int], group: str) -> ReductionCollective:
    plan = decode_plan(name, ints, group)
    assert isinstance(plan, ReductionCollective)
    return plan


_reduced.register_autograd(_backward_reduced, setup_context=_save_reduced)
