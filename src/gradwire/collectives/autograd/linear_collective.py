"""The rules that all linear collectives share: backward is the adjoint, forward mode the op itself.

A linear collective says how it starts, what its adjoint is and what shape it gives. From that
follow the autograd function (whose backward calls `apply_linear` again, so that every derivative
has a derivative), its batching rule and the custom op that stands for it in a compiled graph.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import Function, forward_ad
from torch.distributed import ProcessGroup

from gradwire.collectives.checks.consistency import UNCHECKED, CheckContext
from gradwire.collectives.wire import Pending

P = TypeVar("P", bound="LinearCollective")

_NONE, _INT, _TUPLE = range(3)


@dataclass(frozen=True)
class LinearCollective(ABC):
    """A collective that is linear in its tensor: a plan, made before anything is sent.

    Only the first dim is split or concatenated. So `vmap` needs no rule for each collective: its
    batch dim is moved to the end, and one collective moves the whole batch.

    A subclass is a frozen dataclass, whose further fields are ints, bools, None, or (nested) tuples
    of these.
    """

    name: ClassVar[str]
    field_names: ClassVar[tuple[str, ...]]  # listed once, because Dynamo traces `as_ints`
    group: ProcessGroup

    @abstractmethod
    def start(self, x: Tensor, blocking: bool = False) -> Pending:
        """Send, without gradients; `blocking` says that the result is waited for at once."""

    @abstractmethod
    def adjoint(self) -> LinearCollective:
        """The transpose, under the inner product that sums over the ranks."""

    def rows(self, rows: int) -> int:
        """The size of the result in the first dim, from the input's."""
        return rows

    def as_ints(self) -> list[int]:
        """Its fields but the group, as the integers that the custom op takes."""
        return [n for name in self.field_names for n in _as_ints(getattr(self, name))]


def _as_ints(value: Any) -> list[int]:
    """An int, None, or a tuple of these and of tuples, as integers that say how to read them."""
    if value is None:
        return [_NONE]
    if isinstance(value, tuple):
        return [_TUPLE, len(value), *(n for item in value for n in _as_ints(item))]
    return [_INT, int(value)]


def _from_ints(ints: Iterator[int]) -> Any:
    """The inverse of `_as_ints`: reads one value."""
    kind = next(ints)
    if kind == _NONE:
        return None
    if kind == _INT:
        return next(ints)
    return tuple(_from_ints(ints) for _ in range(next(ints)))


class _LinearFunction(Function):
    @staticmethod
    def forward(x: Tensor, plan: LinearCollective, context: CheckContext) -> Tensor:
        return plan.start(x, blocking=True).wait()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, ctx.plan, ctx.check = inputs

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        with ctx.check.backward(cotangent):
            return apply_linear(ctx.plan.adjoint(), cotangent, ctx.check), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _op: None, _context: None) -> Any:
        return apply_linear(ctx.plan, tangent, ctx.check)

    @staticmethod
    def vmap(
        _info: Any, in_dims: Any, x: Tensor, plan: LinearCollective, context: CheckContext
    ) -> Any:
        return apply_linear(plan, x.movedim(in_dims[0], -1), context), -1


def eager_apply(function: type[Function]) -> Callable[..., Any]:
    """A function's `apply` where neither torch.func nor a compiler looks, at less cost.

    PyTorch inspects the signature of a `forward` that has a `setup_context` in each call, for
    default arguments, which ours do not have: 38 of 70 µs of an all_reduce on 2.15, in C++; before,
    in `Function.apply`, which is left out here. A `forward` that gets the context is not inspected.
    """
    forward, setup_context = function.forward, function.setup_context

    def forward_with_context(ctx: Any, *inputs: Any) -> Any:
        output = forward(*inputs)
        setup_context(ctx, inputs, output)
        return output

    members = {
        "forward": staticmethod(forward_with_context),
        "setup_context": staticmethod(Function.setup_context),
    }
    eager = type(function.__name__, (function,), members)
    apply: Callable[..., Any] = super(Function, eager).apply  # type: ignore[misc]
    return apply


_apply_eagerly = eager_apply(_LinearFunction)


def apply_linear(plan: LinearCollective, x: Tensor, context: CheckContext = UNCHECKED) -> Tensor:
    """The collective on a tensor, differentiable in every mode."""
    if compiling(x):
        return _apply_compiled(plan, x)
    if is_legacy_batchedtensor(x):
        return _batched_cotangent(plan, x, context)
    if torch._C._are_functorch_transforms_active():
        return _LinearFunction.apply(x, plan, context)  # type: ignore[no-any-return, no-untyped-call]
    if not graph_is_needed(x):
        return plan.start(x, blocking=True).wait()
    return _apply_eagerly(x, plan, context)  # type: ignore[no-any-return]


def _batched_cotangent(plan: LinearCollective, x: Tensor, context: CheckContext) -> Tensor:
    """The collective on cotangents of `is_grads_batched`, which has a vmap without rules."""
    level = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    y = apply_linear(plan, torch._remove_batch_dim(x, level, 1, x.dim()), context)
    return torch._add_batch_dim(y, y.dim() - 1, level)


def graph_is_needed(x: Tensor) -> bool:
    """Whether a derivative may be asked of what is made from the tensor."""
    return (x.requires_grad and torch.is_grad_enabled()) or forward_ad._current_level >= 0


def is_transformed() -> bool:
    """Whether torch.func's transforms or forward mode are active."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def compiling(x: Tensor) -> bool:
    """Whether this call is being traced: by Dynamo, or below it, with tensors without data."""
    return torch.compiler.is_compiling() or isinstance(x, (FakeTensor, FunctionalTensor))


# --- compiled graphs ---

_plan_classes: dict[str, type[LinearCollective]] = {}
_custom_ops: dict[str, Callable[[Tensor, list[int], str], Tensor]] = {}


def _apply_compiled(plan: LinearCollective, x: Tensor) -> Tensor:
    return _custom_ops[plan.name](x, plan.as_ints(), plan.group.group_name)


def result_like(x: Tensor, plan: LinearCollective) -> Tensor:
    """An empty tensor of the shape that the collective gives."""
    return x.new_empty((plan.rows(x.shape[0]), *x.shape[1:]) if x.dim() else ())


def decode_plan(name: str, ints: Sequence[int], group_name: str) -> LinearCollective:
    """The inverse of `as_ints`: the collective that a custom op stands for."""
    values = iter(ints)
    plan_class = _plan_classes[name]
    group = dist.distributed_c10d._resolve_process_group(group_name)  # type: ignore[arg-type]
    return plan_class(group, *(_from_ints(values) for _ in plan_class.field_names))


def register_plan(plan_class: type[P]) -> type[P]:
    """Class decorator: give the collective a custom op, `gradwire::<name>`, for compiled graphs.

    Dynamo refuses an autograd function with a rule for forward mode; so compiled graphs have an
    operator of their own, whose backward is the adjoint's operator.

    Stands above `@dataclass`, whose fields it lists, or alone where a plan adds none to the base
    class's. `name` is unique. Checks are not included: the public function calls `run_checked`.
    """
    name = plan_class.name
    _plan_classes[name] = plan_class
    names = [field.name for field in fields(plan_class)]
    plan_class.field_names = tuple(name for name in names if name != "group")

    def run(x: Tensor, ints: list[int], group: str) -> Tensor:
        return decode_plan(name, ints, group).start(x, blocking=True).wait()

    def fake(x: Tensor, ints: list[int], group: str) -> Tensor:
        return result_like(x, decode_plan(name, ints, group))

    def save(ctx: Any, inputs: Any, output: Any) -> None:
        _, *ctx.encoded = inputs

    def backward(ctx: Any, cotangent: Tensor) -> Any:
        adjoint = decode_plan(name, *ctx.encoded).adjoint()
        return _apply_compiled(adjoint, cotangent), None, None

    schema = "(Tensor x, int[] ints, str group) -> Tensor"
    op = torch.library.custom_op(f"gradwire::{name}", run, mutates_args=(), schema=schema)
    op.register_fake(fake)
    op.register_autograd(backward, setup_context=save)
    _custom_ops[name] = op
    return plan_class
