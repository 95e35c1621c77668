"""Rules shared by all linear collectives: backward is the adjoint, forward mode the op itself.

A linear collective defines how it starts, its adjoint, and the shape of its result. From these
follow the autograd function, the batching rule and the custom op of compiled graphs. The autograd
function's backward calls `apply` again, so that derivatives of every order exist.

An asynchronous collective is two autograd nodes: the start returns a token, from which the wait
makes the result. In backward, the wait runs first and starts the adjoint collective, for which the
start then waits. Computation between the two overlaps with communication in both passes.
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
from torch.autograd import Function
from torch.distributed import ProcessGroup

from gradwire.collectives import wire
from gradwire.collectives.arguments import refuse_split
from gradwire.collectives.autograd import compiling, eager_apply, graph_is_needed, is_transformed
from gradwire.collectives.consistency import CheckContext
from gradwire.collectives.handles import Handle

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
    def start(self, x: Tensor, blocking: bool = False) -> wire.Pending:
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

    def apply(self, x: Tensor, context: CheckContext) -> Tensor:
        """Run the collective, differentiably in every mode."""
        if compiling(x):
            return _apply_compiled(self, x)
        if is_legacy_batchedtensor(x):
            return _batched_cotangent(self, x, context)
        if torch._C._are_functorch_transforms_active():
            return _LinearFunction.apply(x, self, context)  # type: ignore[no-any-return, no-untyped-call]
        if not graph_is_needed(x):
            return self.start(x, blocking=True).wait()
        return _apply_eagerly(x, self, context)  # type: ignore[no-any-return]

    def apply_async(self, x: Tensor, context: CheckContext) -> Handle[Tensor]:
        """Start the collective; return a handle of its result, differentiable if `x` is."""
        refuse_split(x)
        if not graph_is_needed(x):
            return Handle(self.start(x).wait, self.name)
        state = AsyncState()
        token = _Start.apply(x, self, state, context)  # type: ignore[no-untyped-call]
        return handle_of_token(token, self, state, context)


def divided(plan: Any, moved: wire.Pending) -> wire.Pending:
    """Divide the result of a plan that only moves values, if the plan is an average."""
    return wire.Pending((), lambda: moved.wait().div_(plan.group.size())) if plan.average else moved


def _as_ints(value: Any) -> list[int]:
    """Encode an int, None or nested tuple of these as self-describing integers."""
    if value is None:
        return [_NONE]
    if isinstance(value, tuple):
        return [_TUPLE, len(value), *(n for item in value for n in _as_ints(item))]
    if not isinstance(value, int):
        raise TypeError(f"a plan has {value!r}: its fields are ints, None and tuples of these")
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
            return ctx.plan.adjoint().apply(cotangent, ctx.check), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _op: None, _context: None) -> Any:
        return ctx.plan.apply(tangent, ctx.check)

    @staticmethod
    def vmap(
        _info: Any, in_dims: Any, x: Tensor, plan: LinearCollective, context: CheckContext
    ) -> Any:
        return plan.apply(x.movedim(in_dims[0], -1), context), -1


_apply_eagerly = eager_apply(_LinearFunction)


def _batched_cotangent(plan: LinearCollective, x: Tensor, context: CheckContext) -> Tensor:
    """Apply a collective to cotangents of `is_grads_batched`, whose vmap has no batching rules."""
    level = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    y = plan.apply(torch._remove_batch_dim(x, level, 1, x.dim()), context)
    return torch._add_batch_dim(y, y.dim() - 1, level)


# --- asynchronous collectives ---


class AsyncState:
    """State shared by the start and the wait of an asynchronous collective.

    Attributes:
        pending: Collective under way, from the start to the wait.
        adjoint: State of the adjoint collective in backward, from the wait to the start.
        result: Copy of the result, if backward needs it. In backward, the result of an adjoint
            collective that was not split into a start and a wait.
    """

    __slots__ = ("adjoint", "pending", "result")

    def __init__(self) -> None:
        self.pending: wire.Pending | None = None
        self.adjoint: AsyncState | None = None
        self.result: Tensor | None = None

    def wait(self) -> Tensor:
        """Wait for the collective, and return its result."""
        assert self.pending is not None
        pending, self.pending = self.pending, None
        return pending.wait()

    def wait_adjoint(
        self, token: Tensor, adjoint: LinearCollective, context: CheckContext
    ) -> Tensor:
        """Return, in backward, the result of the adjoint collective that the wait started."""
        state, self.adjoint = self.adjoint, None
        assert state is not None
        if state.result is not None:
            return state.result
        return _Wait.apply(token, adjoint, state, context)  # type: ignore[no-any-return, no-untyped-call]


class _Start(Function):
    """Start the collective: from the tensor to a token."""

    @staticmethod
    def forward(
        x: Tensor, plan: LinearCollective, state: AsyncState, context: CheckContext
    ) -> Tensor:
        state.pending = plan.start(x)
        return x.new_zeros(())  # 0-d: the shapes of input and result may differ

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, ctx.plan, ctx.state, ctx.check = inputs

    @staticmethod
    def backward(ctx: Any, token: Tensor) -> Any:
        return ctx.state.wait_adjoint(token, ctx.plan.adjoint(), ctx.check), None, None, None


class _Wait(Function):
    """Wait for the collective: from the token to the result."""

    @staticmethod
    def forward(
        token: Tensor, plan: LinearCollective, state: AsyncState, context: CheckContext
    ) -> Tensor:
        return state.wait()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, ctx.plan, ctx.state, ctx.check = inputs

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        # Runs first in backward; the backward of _Start waits. Nodes that autograd runs in between
        # overlap with the adjoint collective.
        ctx.state.adjoint = adjoint = AsyncState()
        with ctx.check.backward(cotangent):
            if is_legacy_batchedtensor(cotangent) or is_transformed():
                # Such cotangents (is_grads_batched, forward mode) cannot be split: only the
                # synchronous collective has the rules that they need.
                adjoint.result = ctx.plan.adjoint().apply(cotangent, ctx.check)
                token = torch.zeros((), dtype=cotangent.dtype, device=cotangent.device)
                return token, None, None, None
            return _Start.apply(cotangent, ctx.plan.adjoint(), adjoint, ctx.check), None, None, None  # type: ignore[no-untyped-call]


def handle_of_token(
    token: Tensor, plan: LinearCollective, state: AsyncState, context: CheckContext
) -> Handle[Tensor]:
    """Return a handle for a collective that was started, given its token."""

    def finish() -> Tensor:
        return _Wait.apply(token, plan, state, context)  # type: ignore[no-any-return, no-untyped-call]

    return Handle(finish, plan.name)


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
