"""Reduction ops and their rules; what is not linear is pulled back through the linear part.

A reduction's cotangent is first brought to all ranks by the adjoint of the sum (that is `total`);
then each rank applies its own factor: 1 for a sum, its share of the ties for an extremum, the
product of the others for a product.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.distributed import ProcessGroup

from gradwire.collectives.agreement import Note
from gradwire.collectives.handles import Handle, after, run
from gradwire.collectives.linear import (
    Linear,
    compiling,
    graph_is_needed,
    linear,
    restored_linear,
    result_like,
)
from gradwire.collectives.parts import exclusive_product
from gradwire.collectives.wire import Pending
from gradwire.errors import ArgumentError, ArgumentTypeError

__all__ = ["Op", "Premul", "Reducing", "as_reduction", "check_reducible", "reduce_with", "scaled"]


@dataclass(frozen=True)
class Premul:
    """The reduction Σ c·x, where each rank has a factor c of its own.

    Args:
        factor: A number, or a tensor that can be multiplied with x; differentiable.

    Example:
        >>> from gradwire.collectives import Premul, all_reduce
        >>> def main():
        ...     return all_reduce(torch.ones(1), Premul(10.0**dist.get_rank()))
        >>> run_ranks(main, world_size=2)  # 1 + 10
        [tensor([11.]), tensor([11.])]
    """

    factor: float | Tensor


Op = str | Premul | dist.ReduceOp | dist.ReduceOp.RedOpType
"""A name, one of torch.distributed's, or a `Premul`."""

_NAMES = ("sum", "avg", "max", "min", "product", "band", "bor", "bxor")
_BITWISE = ("band", "bor", "bxor")


def as_reduction(op: object) -> str | Premul:
    """The reduction's name, or the `Premul` itself.

    Raises:
        ArgumentError, ArgumentTypeError: Not a reduction.
    """
    if isinstance(op, Premul):
        return op
    if isinstance(op, str):
        name = op.lower()
    elif isinstance(op, dist.ReduceOp | dist.ReduceOp.RedOpType):
        # A RedOpType says that it is an instance of ReduceOp too.
        kind: Any = op if isinstance(op, dist.ReduceOp.RedOpType) else op.op  # type: ignore[attr-defined]
        name = kind.name.lower()
    else:
        raise ArgumentTypeError(f"op is {op!r}: give one of {', '.join(_NAMES)}, or a Premul")
    if name not in _NAMES:
        raise ArgumentError(f"op is {op!r}: give one of {', '.join(_NAMES)}, or a Premul")
    return name


def check_reducible(x: Tensor, op: str | Premul) -> None:
    """Raise if the op is not defined for the tensor's dtype.

    Raises:
        ArgumentError: It is not.
    """
    real_or_complex = x.is_floating_point() or x.is_complex()
    if op in _BITWISE and real_or_complex:
        raise ArgumentError(f"op is {op}, tensor is {x.dtype}: it takes integers and booleans")
    if op in ("max", "min") and x.is_complex():
        raise ArgumentError(f"op is {op}, tensor is {x.dtype}: complex numbers have no order")
    if op == "avg" and not real_or_complex:
        raise ArgumentError(f"op is avg, tensor is {x.dtype}: it takes floating-point numbers")
    if x.dtype == torch.bool and op not in ("band", "bor", "bxor", "max", "min"):
        raise ArgumentError(f"op is {op}, tensor is torch.bool: give band, bor, bxor, max or min")


class Reducing(Linear):
    """A linear collective that sums, and can reduce otherwise along the same way."""

    @abstractmethod
    def start_with(self, x: Tensor, op: str) -> Pending:
        """Send, with another reduction."""

    @abstractmethod
    def everywhere(self, y: Tensor) -> Tensor:
        """The whole result on all ranks, from what each has."""

    @abstractmethod
    def total(self, x: Tensor) -> Tensor:
        """The sum of the whole tensors, on all ranks."""


def reduce_with(
    form: Reducing, x: Tensor, op: str | Premul, note: Note | None, async_op: bool
) -> Any:
    """The reduction along the way that `form` goes; its result, or its handle."""
    if isinstance(op, Premul):
        return run(form, x * op.factor, note, async_op)
    if op in ("sum", "avg"):
        return scaled(run(form, x, note, async_op), op, form.group)
    if async_op:
        pending = form.start_with(x.detach(), op)
        return Handle(lambda: _attached(form, x, op, note, pending.wait()), form.name)
    if op in _BITWISE or not (x.is_floating_point() or x.is_complex()):
        return form.start_with(x, op).wait()
    if compiling(x) or torch._C._are_functorch_transforms_active() or graph_is_needed(x):
        return _attached(form, x, op, note, None)
    return form.start_with(x, op).wait()


def scaled(total: Any, op: str | Premul, group: ProcessGroup) -> Any:
    """A sum, or its handle; divided by the number of ranks if an average was asked for."""
    world = group.size()
    return after(total, lambda y: y.div_(world)) if op == "avg" else total


def _attached(
    form: Reducing, x: Tensor, op: str, note: Note | None, result: Tensor | None
) -> Tensor:
    if compiling(x):
        y: Tensor = _reduced(x, form.name, form.plan(), op, form.group.group_name)
        return y
    if op in ("max", "min"):
        return _Extremum.apply(x, form, op, note, result)[0]  # type: ignore[no-any-return, no-untyped-call]
    return _Product.apply(x, form, note, result)  # type: ignore[no-any-return, no-untyped-call]


class _Extremum(Function):
    """max and min. Ties over ranks share the cotangent equally, as torch.amax has it."""

    @staticmethod
    def forward(x: Tensor, form: Reducing, op: str, note: Note | None, result: Any) -> Any:
        y = form.start_with(x, op).wait() if result is None else result
        # Kept apart, because the result may be changed in place.
        return y, y.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, ctx.form, _, ctx.note, _ = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(x, output[1])
        ctx.save_for_forward(x, output[1])

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor, _: Any) -> Any:
        if ctx.note is not None:
            ctx.note.before_backward(cotangent)
        total = linear(ctx.form.adjoint(), cotangent, ctx.note)
        return total * _shares(ctx.form, *ctx.saved_tensors), None, None, None, None

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
    def forward(x: Tensor, form: Reducing, note: Note | None, result: Any) -> Any:
        return form.start_with(x, "product").wait() if result is None else result

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, ctx.form, ctx.note, _ = inputs
        ctx.save_for_backward(x)
        ctx.save_for_forward(x)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        if ctx.note is not None:
            ctx.note.before_backward(cotangent)
        (x,) = ctx.saved_tensors
        total = linear(ctx.form.adjoint(), cotangent, ctx.note)
        return total * exclusive_product(x, ctx.form.group).conj(), None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Any:
        (x,) = ctx.saved_tensors
        return linear(ctx.form, tangent * exclusive_product(x, ctx.form.group), ctx.note)

    @staticmethod
    def vmap(_: Any, in_dims: Any, x: Tensor, *rest: Any) -> Any:
        return _Product.apply(x.movedim(in_dims[0], -1), *rest), -1  # type: ignore[no-untyped-call]


# --- compiled graphs ---


def _run_reduced(x: Tensor, form: str, plan: list[int], op: str, group: str) -> Tensor:
    return _reducing(form, plan, group).start_with(x, op).wait()


def _save_reduced(ctx: Any, inputs: Any, output: Any) -> None:
    x, ctx.name, ctx.plan, ctx.op, ctx.group = inputs
    ctx.save_for_backward(x, output)


def _pull_reduced(ctx: Any, cotangent: Tensor) -> Any:
    form = _reducing(ctx.name, ctx.plan, ctx.group)
    x, y = ctx.saved_tensors
    product = ctx.op == "product"
    factor = exclusive_product(x, form.group).conj() if product else _shares(form, x, y)
    return linear(form.adjoint(), cotangent) * factor, None, None, None, None


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
