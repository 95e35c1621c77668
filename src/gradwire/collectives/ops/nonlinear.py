"""Reductions that are not linear, pulled back through the linear part.

A reduction's cotangent is first brought to all ranks by the adjoint of the sum; then each rank
applies its own factor: 1 for a sum, its share of the ties for an extremum, the product of the
others for a product.
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
from gradwire.collectives.autograd.handles import Handle, Ticket, after, run, waited
from gradwire.collectives.autograd.linear import (
    Linear,
    compiling,
    graph_is_needed,
    linear,
    restored_linear,
    result_like,
)
from gradwire.collectives.checks.consistency import Note, in_backward
from gradwire.collectives.ops.sharded import exclusive_product
from gradwire.collectives.wire import Pending

__all__ = ["Reducing", "reduce_with", "scaled"]


class Reducing(Linear):
    """A linear collective that sums, and can reduce otherwise along the same way."""

    @abstractmethod
    def start_with(self, x: Tensor, op: str, now: bool = False) -> Pending:
        """`start` with another reduction."""

    @abstractmethod
    def everywhere(self, y: Tensor) -> Tensor:
        """The whole result on all ranks, from what each has."""

    @abstractmethod
    def total(self, x: Tensor) -> Tensor:
        """The sum of the whole tensors, on all ranks."""


def reduce_with(form: Reducing, x: Tensor, op: str, note: Note | None, async_op: bool) -> Any:
    """The reduction along the way that `form` goes; its result, or its handle."""
    if op in ("sum", "avg", "premul"):
        return scaled(run(form, x, note, async_op), op, form.group)
    follow = op not in BITWISE and (x.is_floating_point() or x.is_complex())
    if async_op:
        return _begun(form, x, op, note, follow)
    if follow and (
        compiling(x) or torch._C._are_functorch_transforms_active() or graph_is_needed(x)
    ):
        return _followed(form, x, op, note)
    return form.start_with(x, op, now=True).wait()


def scaled(total: Any, op: str, group: ProcessGroup) -> Any:
    """A sum, or its handle; divided by the number of ranks if an average was asked for."""
    world = group.size()
    return after(total, lambda y: y.div_(world)) if op == "avg" else total


def _followed(form: Reducing, x: Tensor, op: str, note: Note | None) -> Tensor:
    """The reduction, with its rule."""
    if compiling(x):
        y: Tensor = _reduced(x, form.name, form.plan(), op, form.group.group_name)
        return y
    if op == "product":
        return _Product.apply(x, form, note)  # type: ignore[no-any-return, no-untyped-call]
    return _Extremum.apply(x, form, op, note)[0]  # type: ignore[no-any-return, no-untyped-call]


def _begun(form: Reducing, x: Tensor, op: str, note: Note | None, follow: bool) -> Handle[Tensor]:
    """The reduction's handle, with its rule if there is one."""
    refuse_split()
    if not follow or not graph_is_needed(x):
        return Handle(form.start_with(x, op).wait, form.name)
    ticket = Ticket()
    token = _Start.apply(x, form, op, ticket, note)  # type: ignore[no-untyped-call]
    return waited(token, form, ticket, note)


def _factor(form: Reducing, op: str, x: Tensor, y: Tensor | None) -> Tensor:
    """What this rank multiplies the total cotangent with."""
    if op == "product":
        return exclusive_product(x, form.group).conj()
    assert y is not None
    return _shares(form, x, y)


class _Extremum(Function):
    """max and min. Ties over ranks share the cotangent equally, as torch.amax has it."""

    @staticmethod
    def forward(x: Tensor, form: Reducing, op: str, note: Note | None) -> Any:
        y = form.start_with(x, op, now=True).wait()
        # Kept apart, because the result may be changed in place.
        return y, y.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, ctx.form, _, ctx.note = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(x, output[1])
        ctx.save_for_forward(x, output[1])

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor, _: Any) -> Any:
        with in_backward(ctx.note, cotangent):
            total = linear(ctx.form.adjoint(), cotangent, ctx.note)
        return total * _shares(ctx.form, *ctx.saved_tensors), None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Any:
        x, y = ctx.saved_tensors
        return linear(ctx.form, tangent * _shares(ctx.form, x, y), ctx.note), None

    @staticmethod
    def vmap(_: Any, in_dims: Any, x: Tensor, *rest: Any) -> Any:
        return _Extremum.apply(x.movedim(in_dims[0], -1), *rest), (-1, -1)  # type: ignore[no-untyped-call]


def _shares(form: Reducing, x: Tensor, y: Tensor) -> Tensor:
    """This rank's part of the derivative of an extremum: 1 over the number of ranks that tie."""
    x, y = x.detach(), form.everywhere(y.detach())
    ties = (x == y) | x.isnan()
    # Counted in bytes, at a quarter of the cost or less.
    small = torch.uint8 if form.group.size() < 256 else torch.int32
    counts = form.total(ties.to(small))
    return ties.to(x.dtype) / counts.to(x.dtype)


class _Product(Function):
    """A product's factor is the product of the other ranks', never the result over its own."""

    @staticmethod
    def forward(x: Tensor, form: Reducing, note: Note | None) -> Tensor:
        return form.start_with(x, "product", now=True).wait()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, ctx.form, ctx.note = inputs
        ctx.save_for_backward(x)
        ctx.save_for_forward(x)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        with in_backward(ctx.note, cotangent):
            total = linear(ctx.form.adjoint(), cotangent, ctx.note)
        return total * exclusive_product(x, ctx.form.group).conj(), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Any:
        (x,) = ctx.saved_tensors
        return linear(ctx.form, tangent * exclusive_product(x, ctx.form.group), ctx.note)

    @staticmethod
    def vmap(_: Any, in_dims: Any, x: Tensor, *rest: Any) -> Any:
        return _Product.apply(x.movedim(in_dims[0], -1), *rest), -1  # type: ignore[no-untyped-call]


class _Start(Function):
    """The front half of a reduction under way; `handles` has the back half."""

    @staticmethod
    def forward(x: Tensor, form: Reducing, op: str, ticket: Ticket, note: Note | None) -> Tensor:
        pending = form.start_with(x, op)

        def finish() -> Tensor:
            y = pending.wait()
            # Kept apart, because the result may be changed in place.
            ticket.kept = None if op == "product" else y.clone()
            return y

        ticket.pending = Pending((), finish)
        return x.new_zeros(())

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, ctx.form, ctx.op, ctx.ticket, ctx.note = inputs
        ctx.save_for_backward(x)

    @staticmethod
    def backward(ctx: Any, token: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        total = ctx.ticket.pulled(token, ctx.form.adjoint(), ctx.note)
        factor = _factor(ctx.form, ctx.op, x, ctx.ticket.kept)
        return total * factor, None, None, None, None


# --- compiled graphs ---


def _run_reduced(x: Tensor, form: str, plan: list[int], op: str, group: str) -> Tensor:
    return _reducing(form, plan, group).start_with(x, op, now=True).wait()


def _save_reduced(ctx: Any, inputs: Any, output: Any) -> None:
    x, ctx.name, ctx.plan, ctx.op, ctx.group = inputs
    ctx.save_for_backward(x, output)


def _pull_reduced(ctx: Any, cotangent: Tensor) -> Any:
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
_reduced.register_autograd(_pull_reduced, setup_context=_save_reduced)
