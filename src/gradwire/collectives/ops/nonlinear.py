"""Reductions that are not linear: max, min and product.

Their backward is that of the sum, the adjoint collective of the cotangent, times a factor that each
rank has for its own tensor: for max and min 1 over the number of ranks that tie, for a product the
product of the other ranks' tensors.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.distributed import ProcessGroup

from gradwire.collectives.args.reductions import BITWISE
from gradwire.collectives.args.transforms import refuse_split
from gradwire.collectives.autograd.handles import AsyncState, Handle, after, run, waited
from gradwire.collectives.autograd.linear import (
    Linear,
    compiling,
    graph_is_needed,
    linear,
    restored_linear,
    result_like,
)
from gradwire.collectives.checks.consistency import CheckContext, check_backward
from gradwire.collectives.ops.sharded import exclusive_product
from gradwire.collectives.wire import Pending

__all__ = ["Reducing", "reduce_with", "scaled"]


class Reducing(Linear):
    """A collective that sums, and can do the same with another reduction."""

    def start(self, x: Tensor, blocking: bool = False) -> Pending:
        """`start_with` for a sum."""
        return self.start_with(x, "sum", blocking)

    @abstractmethod
    def start_with(self, x: Tensor, op: str, blocking: bool = False) -> Pending:
        """`start` with another reduction."""

    def adjoint_of_result(self, y: Tensor) -> Tensor:
        """The whole result on every rank: its adjoint collective, or for an all_reduce itself."""
        return linear(self.adjoint(), y)

    @abstractmethod
    def sum_over_ranks(self, x: Tensor) -> Tensor:
        """The sum of the ranks' inputs, unsplit and on all ranks."""


def reduce_with(
    form: Reducing, x: Tensor, op: str, context: CheckContext | None, async_op: bool
) -> Any:
    """The collective `form` with another reduction: its result, or its handle."""
    if op in ("sum", "avg", "premul"):
        return scaled(run(form, x, context, async_op), op, form.group)
    differentiable = op not in BITWISE and (x.is_floating_point() or x.is_complex())
    if async_op:
        return _start_async(form, x, op, context, differentiable)
    if differentiable and (
        compiling(x) or torch._C._are_functorch_transforms_active() or graph_is_needed(x)
    ):
        return _differentiable(form, x, op, context)
    return form.start_with(x, op, blocking=True).wait()


def scaled(total: Any, op: str, group: ProcessGroup) -> Any:
    """A sum, or its handle; divided by the number of ranks for "avg"."""
    world = group.size()
    return after(total, lambda y: y.div_(world)) if op == "avg" else total


def _differentiable(form: Reducing, x: Tensor, op: str, context: CheckContext | None) -> Tensor:
    """The reduction, with its derivatives."""
    if compiling(x):
        y: Tensor = _reduced(x, form.name, form.plan(), op, form.group.group_name)
        return y
    if op == "product":
        return _Product.apply(x, form, context)  # type: ignore[no-any-return, no-untyped-call]
    return _Extremum.apply(x, form, op, context)[0]  # type: ignore[no-any-return, no-untyped-call]


def _start_async(
    form: Reducing, x: Tensor, op: str, context: CheckContext | None, differentiable: bool
) -> Handle[Tensor]:
    """The reduction's handle, with its derivative if it has one."""
    refuse_split()
    if not differentiable or not graph_is_needed(x):
        return Handle(form.start_with(x, op).wait, form.name)
    state = AsyncState()
    token = _Start.apply(x, form, op, state, context)  # type: ignore[no-untyped-call]
    return waited(token, form, state, context)


def _factor(form: Reducing, op: str, x: Tensor, y: Tensor | None) -> Tensor:
    """What this rank multiplies the cotangent of the sum with."""
    if op == "product":
        return exclusive_product(x, form.group).conj()
    assert y is not None
    return _share_of_ties(form, x, y)


class _Extremum(Function):
    """max and min. Ties over ranks share the cotangent equally, as torch.amax has it."""

    @staticmethod
    def forward(x: Tensor, form: Reducing, op: str, context: CheckContext | None) -> Any:
        y = form.start_with(x, op, blocking=True).wait()
        # A copy for backward, because the caller may change the result in place.
        return y, y.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, ctx.form, _, ctx.check = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(x, output[1])
        ctx.save_for_forward(x, output[1])

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor, _: Any) -> Any:
        with check_backward(ctx.check, cotangent):
            total = linear(ctx.form.adjoint(), cotangent, ctx.check)
        return total * _share_of_ties(ctx.form, *ctx.saved_tensors), None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Any:
        x, y = ctx.saved_tensors
        return linear(ctx.form, tangent * _share_of_ties(ctx.form, x, y), ctx.check), None

    @staticmethod
    def vmap(_: Any, in_dims: Any, x: Tensor, *rest: Any) -> Any:
        return _Extremum.apply(x.movedim(in_dims[0], -1), *rest), (-1, -1)  # type: ignore[no-untyped-call]


def _share_of_ties(form: Reducing, x: Tensor, y: Tensor) -> Tensor:
    """This rank's part of the derivative of an extremum: 1 over the number of ranks that tie."""
    x, y = x.detach(), form.adjoint_of_result(y.detach())
    ties = (x == y) | x.isnan()
    # Counted in uint8: a quarter of the bytes of float32, or less.
    small = torch.uint8 if form.group.size() < 256 else torch.int32
    counts = form.sum_over_ranks(ties.to(small))
    return ties.to(x.dtype) / counts.to(x.dtype)


class _Product(Function):
    """product. Its factor is the product of the other ranks, not result / x: x may be 0."""

    @staticmethod
    def forward(x: Tensor, form: Reducing, context: CheckContext | None) -> Tensor:
        return form.start_with(x, "product", blocking=True).wait()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, ctx.form, ctx.check = inputs
        ctx.save_for_backward(x)
        ctx.save_for_forward(x)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        with check_backward(ctx.check, cotangent):
            total = linear(ctx.form.adjoint(), cotangent, ctx.check)
        return total * exclusive_product(x, ctx.form.group).conj(), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Any:
        (x,) = ctx.saved_tensors
        return linear(ctx.form, tangent * exclusive_product(x, ctx.form.group), ctx.check)

    @staticmethod
    def vmap(_: Any, in_dims: Any, x: Tensor, *rest: Any) -> Any:
        return _Product.apply(x.movedim(in_dims[0], -1), *rest), -1  # type: ignore[no-untyped-call]


class _Start(Function):
    """Starts an asynchronous reduction; `handles` has the wait."""

    @staticmethod
    def forward(
        x: Tensor, form: Reducing, op: str, state: AsyncState, context: CheckContext | None
    ) -> Tensor:
        pending = form.start_with(x, op)

        def finish() -> Tensor:
            y = pending.wait()
            # A copy for backward, because the caller may change the result in place.
            state.result = None if op == "product" else y.clone()
            return y

        state.pending = Pending((), finish)
        return x.new_zeros(())

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, ctx.form, ctx.op, ctx.state, ctx.check = inputs
        ctx.save_for_backward(x)

    @staticmethod
    def backward(ctx: Any, token: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        total = ctx.state.wait_adjoint(token, ctx.form.adjoint(), ctx.check)
        factor = _factor(ctx.form, ctx.op, x, ctx.state.result)
        return total * factor, None, None, None, None


# --- compiled graphs ---


def _run_reduced(x: Tensor, form: str, plan: list[int], op: str, group: str) -> Tensor:
    return _reducing(form, plan, group).start_with(x, op, blocking=True).wait()


def _save_reduced(ctx: Any, inputs: Any, output: Any) -> None:
    x, ctx.name, ctx.plan, ctx.op, ctx.group = inputs
    ctx.save_for_backward(x, output)


def _backward_reduced(ctx: Any, cotangent: Tensor) -> Any:
    form = _reducing(ctx.name, ctx.plan, ctx.group)
    x, y = ctx.saved_tensors
    total = linear(form.adjoint(), cotangent)
    return total * _factor(form, ctx.op, x, y), None, None, None, None


def _fake_reduced(x: Tensor, form: str, plan: list[int], op: str, group: str) -> Tensor:
    return result_like(x, _reducing(form, plan, group))


def _reducing(form: str, plan: list[int], group: str) -> Reducing:
    restored = restored_linear(form, plan, group)
    assert isinstance(restored, Reducing)
    return restored


_reduced = torch.library.custom_op(
    "gradwire::reduced",
    _run_reduced,
    mutates_args=(),
    schema="(Tensor x, str form, int[] plan, str op, str group) -> Tensor",
)
_reduced.register_fake(_fake_reduced)
_reduced.register_autograd(_backward_reduced, setup_context=_save_reduced)
