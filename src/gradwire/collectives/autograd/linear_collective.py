"""Rules shared by all linear collectives: backward is the adjoint, forward mode the op itself.

A linear collective defines how it starts, its adjoint, and the shape of its result. From these
follow the autograd function, the batching rule and the custom op of compiled graphs. The autograd
function's backward calls `apply_linear` again, so that derivatives of every order exist.
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
    """Plan of a collective that is linear in its tensor, made before anything is sent.

    Only the first dim is split or concatenated. One rule for `vmap` therefore suffices: the batch
    dim is moved to the end, and one collective handles the whole batch.

    A subclass is a frozen dataclass, whose fields are ints, bools, None, or (nested) tuples of
    these.
    """

    name: ClassVar[str]
    field_names: ClassVar[tuple[str, ...]]  # precomputed, because Dynamo traces `as_ints`
    group: ProcessGroup

    @abstractmethod
    def start(self, x: Tensor, blocking: bool = False) -> Pending:
        """Start, without gradients; `blocking` hints that the caller waits immediately."""

    @abstractmethod
    def adjoint(self) -> LinearCollective:
        """Return the transpose, under the inner product that sums over the ranks."""

    def rows(self, rows: int) -> int:
        """Return the result's size in the first dim, given the input's."""
        return rows

    def as_ints(self) -> list[int]:
        """Encode all fields but the group as integers, which are arguments of the custom op."""
        return [n for name in self.field_names for n in _as_ints(getattr(self, name))]


def _as_ints(value: Any) -> list[int]:
    """Encode an int, None or nested tuple of these as self-describing integers."""
    if value is None:
        return [_NONE]
    if isinstance(value, tuple):
        return [_TUPLE, len(value), *(n for item in value for n in _as_ints(item))]
    return [_INT, int(value)]


def _from_ints(ints: Iterator[int]) -> Any:
    """Decode one value that `_as_ints` encoded."""
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
    """Return a faster `apply` of a function, for use outside torch.func and compilers.

    If a function has a `setup_context`, PyTorch inspects the signature of `forward` in each call,
    for default arguments: 38 of the 70 µs of an all_reduce. PyTorch 2.15 does so in C++, earlier
    versions in `Function.apply`, which is bypassed here. A `forward` that takes the context is not
    inspected.
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
    """Apply a collective to a tensor, differentiably in every mode."""
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
    """Apply a collective to cotangents of `is_grads_batched`, whose vmap has no batching rules."""
    level = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    y = apply_linear(plan, torch._remove_batch_dim(x, level, 1, x.dim()), context)
    return torch._add_batch_dim(y, y.dim() - 1, level)


def graph_is_needed(x: Tensor) -> bool:
    """Return True if derivatives may be taken with respect to the tensor."""
    return (x.requires_grad and torch.is_grad_enabled()) or forward_ad._current_level >= 0


def is_transformed() -> bool:
    """Return True if a torch.func transform or forward mode is active."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def compiling(x: Tensor) -> bool:
    """Return True if the call is being traced, by Dynamo or below it with fake tensors."""
    return torch.compiler.is_compiling() or isinstance(x, (FakeTensor, FunctionalTensor))


# --- compiled graphs ---

_plan_classes: dict[str, type[LinearCollective]] = {}
_custom_ops: dict[str, Callable[[Tensor, list[int], str], Tensor]] = {}


def _apply_compiled(plan: LinearCollective, x: Tensor) -> Tensor:
    return _custom_ops[plan.name](x, plan.as_ints(), plan.group.group_name)


def result_like(x: Tensor, plan: LinearCollective) -> Tensor:
    """Return an uninitialized tensor of the shape of the collective's result."""
    return x.new_empty((plan.rows(x.shape[0]), *x.shape[1:]) if x.dim() else ())


def decode_plan(name: str, ints: Sequence[int], group_name: str) -> LinearCollective:
    """Return the collective of a custom op, given the integers of `as_ints`."""
    values = iter(ints)
    plan_class = _plan_classes[name]
    group = dist.distributed_c10d._resolve_process_group(group_name)  # type: ignore[arg-type]
    return plan_class(group, *(_from_ints(values) for _ in plan_class.field_names))


def register_plan(plan_class: type[P]) -> type[P]:
    """Class decorator that defines a custom op, `gradwire::<name>`, for compiled graphs.

    Dynamo does not trace an autograd function with a rule for forward mode. Compiled graphs contain
    this operator instead, whose backward is the adjoint's operator.

    Place it above `@dataclass`, or use it alone if the plan adds no fields to the base class.
    `name` must be unique. Checks are not part of the op: the public function runs them.
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
