"""A call of a collective: its plan in every mode of autograd, and the comparison between ranks.

A plan says how a collective starts, its adjoint, and the shape of its result. From these follow the
autograd function, the batching rule and the custom op of compiled graphs. The autograd function's
backward calls `apply` again, so that derivatives of every order exist.

An asynchronous collective is two autograd nodes: the start returns a token, from which the wait
makes the result. In backward, the wait runs first and starts the adjoint collective, for which the
start then waits. Computation between the two overlaps with communication in both passes.

With checks on, ranks exchange their call signatures first. On shm, unless checks are switched off,
a 64-bit hash of the signature, its *mark*, is sent in the header of the collective itself. If marks
differ, the collective raises on all ranks before any data is sent, and the ranks exchange
signatures. If the signatures differ only in which ranks require a gradient, the call is repeated
with a gradient on all ranks; otherwise an error names the difference. A call without a mark, such
as PyTorch's own on another rank, is compared by op, dtype and size only.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, ClassVar, Generic, Literal, TypedDict, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import Function, forward_ad
from torch.distributed import ProcessGroup

from gradwire._groups import weight_of_backward
from gradwire.collectives import consistency, wire
from gradwire.collectives.consistency import (
    CallSignature,
    CheckContext,
    PeerSignature,
    signature_hash,
    unchecked,
)
from gradwire.collectives.validation import refuse_split
from gradwire.errors import CheckedMismatchError, NotSupportedError

T = TypeVar("T")
S = TypeVar("S")
P = TypeVar("P", bound="Plan")


class Handle(Generic[T]):
    """An asynchronous collective; `wait` returns its result.

    Until `wait` returns, the input is in use: do not modify it.

    Dropping a handle without `wait` emits a warning: in backward, other ranks may wait for a node
    that does not exist on this rank.

    Example:
        >>> from gradwire.collectives import all_reduce
        >>> def main():
        ...     handle = all_reduce(torch.ones(2), async_op=True)
        ...     # computation here overlaps with the collective
        ...     return handle.wait()
        >>> run_ranks(main, world_size=2)
        [tensor([2., 2.]), tensor([2., 2.])]
    """

    def __init__(self, finish: Callable[[], T], name: str) -> None:
        self._finish: Callable[[], T] | None = finish
        self._name = name
        self._result: T | None = None
        self._error: Exception | None = None
        self._chained = False

    def wait(self) -> T:
        """Return the differentiable result; further calls return or raise the same."""
        if self._finish is not None:
            finish, self._finish = self._finish, None
            try:
                self._result = finish()
            except Exception as error:
                self._error = error
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]

    def then(self, fn: Callable[[T], S]) -> Handle[S]:
        """Return a handle of `fn` applied to the result; it replaces this handle."""
        self._chained = True
        return Handle(lambda: fn(self.wait()), self._name)

    def __del__(self) -> None:
        if getattr(self, "_finish", None) is not None and not self._chained:
            warnings.warn(
                f"a handle of {self._name} was dropped without wait(): its result, and the "
                "gradient through it, are lost",
                ResourceWarning,
                stacklevel=2,
            )


class _Options(TypedDict, total=False):
    """Keyword arguments that overloads of every collective with `async_op` unpack (PEP 692)."""

    # The overloads tell type checkers if a call returns its result or a `Handle`.

    group: ProcessGroup | None
    check: bool | None


class Sync(_Options, total=False):
    """Options of a call that returns its result."""

    async_op: Literal[False]


class Async(_Options):
    """Options of a call with `async_op=True`, which returns a handle."""

    async_op: Literal[True]


class SyncTo(Sync, total=False):
    group_dst: int | None


class AsyncTo(Async, total=False):
    group_dst: int | None


class SyncFrom(Sync, total=False):
    group_src: int | None


class AsyncFrom(Async, total=False):
    group_src: int | None


def graph_is_needed(x: Tensor) -> bool:
    """Return True if derivatives may be taken with respect to the tensor."""
    return (x.requires_grad and torch.is_grad_enabled()) or forward_ad._current_level >= 0


def is_transformed() -> bool:
    """Return True if a torch.func transform or forward mode is active."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def compiling(x: Tensor) -> bool:
    """Return True if the call is being traced, by Dynamo or below it with fake tensors."""
    return torch.compiler.is_compiling() or isinstance(x, (FakeTensor, FunctionalTensor))


# Where ranks exchange cotangents, the weight of the rank whose loss they come from counts, while
# `ddp` multiplies gradients by the receiver's at the end. So they are multiplied before they are
# sent, and divided when they are received.


def sent(cotangent: Tensor) -> Tensor:
    """Return a cotangent as it is sent to other ranks, in backward."""
    weight = weight_of_backward()
    if not weight:  # of a mean over no samples, which is NaN
        return torch.zeros_like(cotangent)
    return cotangent if weight == 1.0 else cotangent * weight


def received(cotangent: Tensor) -> Tensor:
    """Invert `sent` for a cotangent that came from other ranks."""
    weight = weight_of_backward()
    return cotangent if weight in (0.0, 1.0) else cotangent / weight


def eager_apply(function: type[Function]) -> Callable[..., Any]:
    """Return a faster `apply` of a function, for use outside torch.func and compilers."""
    # If a function has a `setup_context`, PyTorch inspects the signature of `forward` in each call,
    # for default arguments: 38 of the 70 µs of an all_reduce. PyTorch 2.15 does so in C++, earlier
    # versions in `Function.apply`, which is bypassed here. A `forward` that takes the context is
    # not inspected.
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


@dataclass(frozen=True)
class Plan(ABC):
    """Plan of a collective, made before anything is sent; subclasses are frozen dataclasses."""

    # A collective is linear in its tensor, except for some reductions (`nonlinear`), whose adjoint
    # is that of the sum. Only the first dim is split or concatenated. One rule for `vmap` therefore
    # suffices: the batch dim is moved to the end, and one collective handles the whole batch.
    name: ClassVar[str]
    field_names: ClassVar[tuple[str, ...]]  # precomputed, because Dynamo traces `as_ints`
    # Fields of subclasses are ints, bools, None, names of reductions, or (nested) tuples of these.
    group: ProcessGroup

    @abstractmethod
    def start(self, x: Tensor, blocking: bool = False) -> wire.Pending:
        """Start, without gradients; `blocking` hints that the caller waits immediately."""

    @abstractmethod
    def adjoint(self) -> Plan:
        """Return the transpose, under the inner product that sums over the ranks."""

    def rows(self, rows: int) -> int:
        """Return the result's size in the first dim, given the input's."""
        return rows

    @property
    def nonlinear(self) -> bool:
        """Return True if the gradient is the adjoint's result times `derivative`."""
        return False

    def derivative(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the derivative of a nonlinear plan's result with respect to this rank's tensor."""
        raise NotImplementedError

    def kept(self, y: Tensor) -> Tensor | None:
        """Return what `derivative` needs of a result, in its own memory."""
        return None

    def as_ints(self) -> list[int]:
        """Encode all fields but the group as integers, which are arguments of the custom op."""
        return [n for name in self.field_names for n in _as_ints(getattr(self, name))]

    def apply(self, x: Tensor, context: CheckContext) -> Tensor:
        """Run the collective, differentiably in every mode."""
        if compiling(x):
            return self.apply_compiled(x)
        if is_legacy_batchedtensor(x):
            # cotangents of `is_grads_batched`, whose vmap has no batching rules
            level = torch._C._vmapmode_increment_nesting() - 1
            torch._C._vmapmode_decrement_nesting()
            y = self.apply(torch._remove_batch_dim(x, level, 1, x.dim()), context)
            return torch._add_batch_dim(y, y.dim() - 1, level)
        if torch._C._are_functorch_transforms_active():
            return _Apply.apply(x, self, context)  # type: ignore[no-any-return, no-untyped-call]
        if not graph_is_needed(x):
            return self.start(x, blocking=True).wait()
        return _apply_eagerly(x, self, context)  # type: ignore[no-any-return]

    def apply_compiled(self, x: Tensor) -> Tensor:
        """Add the custom op to a compiled graph."""
        return _custom_ops[self.name](x, self.as_ints(), self.group.group_name)

    def apply_adjoint(self, cotangent: Tensor, context: CheckContext) -> Tensor:
        """Return the gradient, in backward."""
        with context(cotangent):
            return received(self.adjoint().apply(sent(cotangent), context))

    def apply_async(self, x: Tensor, context: CheckContext) -> Handle[Tensor]:
        """Start the collective; return a handle of its result, differentiable if `x` is."""
        refuse_split(x)
        if not graph_is_needed(x):
            return Handle(self.start(x).wait, self.name)
        state = _AsyncState()
        token = _Start.apply(x, self, state, context)  # type: ignore[no-untyped-call]
        return Handle(lambda: _Wait.apply(token, self, state, context), self.name)  # type: ignore[no-untyped-call]


class _Apply(Function):
    @staticmethod
    def forward(x: Tensor, plan: Plan, context: CheckContext) -> Tensor:
        return plan.start(x, blocking=True).wait()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, ctx.plan, ctx.check = inputs

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        return ctx.plan.apply_adjoint(cotangent, ctx.check), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _plan: None, _context: None) -> Any:
        return ctx.plan.apply(tangent, ctx.check)

    @staticmethod
    def vmap(_info: Any, in_dims: Any, x: Tensor, plan: Plan, context: CheckContext) -> Any:
        return plan.apply(x.movedim(in_dims[0], -1), context), -1


_apply_eagerly = eager_apply(_Apply)


def divided(plan: Any, moved: wire.Pending) -> wire.Pending:
    """Divide the result of a plan that only moves values, if the plan is an average."""
    return wire.Pending((), lambda: moved.wait().div_(plan.group.size())) if plan.average else moved


# --- asynchronous collectives ---


@dataclass(slots=True)
class _AsyncState:
    """State shared by the start and the wait of an asynchronous collective."""

    # Collective under way, from the start to the wait.
    pending: wire.Pending | None = None
    # State of the adjoint collective in backward, from the wait to the start.
    adjoint: _AsyncState | None = None
    # Part of the result that backward needs. In backward, the result of an adjoint collective that
    # was not split into a start and a wait.
    result: Tensor | None = None


class _Start(Function):
    """Start the collective: from the tensor to a token."""

    @staticmethod
    def forward(x: Tensor, plan: Plan, state: _AsyncState, context: CheckContext) -> Tensor:
        state.pending = plan.start(x)
        return x.new_zeros(())  # 0-d: the shapes of input and result may differ

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, ctx.plan, ctx.state, ctx.check = inputs
        if ctx.plan.nonlinear:
            ctx.save_for_backward(x)

    @staticmethod
    def backward(ctx: Any, token: Tensor) -> Any:
        state, ctx.state.adjoint = ctx.state.adjoint, None
        gradient = state.result
        if gradient is None:
            gradient = _Wait.apply(token, ctx.plan.adjoint(), state, ctx.check)  # type: ignore[no-untyped-call]
        gradient = received(gradient)
        if ctx.plan.nonlinear:
            derivative = ctx.plan.derivative(*ctx.saved_tensors, ctx.state.result)
            gradient = gradient * derivative.conj()
        return gradient, None, None, None


class _Wait(Function):
    """Wait for the collective: from the token to the result."""

    @staticmethod
    def forward(token: Tensor, plan: Plan, state: _AsyncState, context: CheckContext) -> Tensor:
        assert state.pending is not None
        pending, state.pending = state.pending, None
        y = pending.wait()
        state.result = plan.kept(y)
        return y

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, ctx.plan, ctx.state, ctx.check = inputs

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        # Runs first in backward; the backward of _Start waits. Nodes that autograd runs in between
        # overlap with the adjoint collective.
        ctx.state.adjoint = adjoint = _AsyncState()
        cotangent = sent(cotangent)
        with ctx.check(cotangent):
            if is_legacy_batchedtensor(cotangent) or is_transformed():
                # Such cotangents (is_grads_batched, forward mode) cannot be split: only the
                # synchronous collective has the rules that they need.
                adjoint.result = ctx.plan.adjoint().apply(cotangent, ctx.check)
                token = torch.zeros((), dtype=cotangent.dtype, device=cotangent.device)
            else:
                token = _Start.apply(cotangent, ctx.plan.adjoint(), adjoint, ctx.check)  # type: ignore[no-untyped-call]
        return token, None, None, None


# --- compiled graphs ---

_plan_classes: dict[str, type[Plan]] = {}
_custom_ops: dict[str, Callable[[Tensor, list[int], str], Tensor]] = {}
_NONE, _INT, _NAME, _TUPLE = range(4)


def _as_ints(value: Any) -> list[int]:
    """Encode an int, None, a reduction or a nested tuple of these as self-describing integers."""
    if value is None:
        return [_NONE]
    if isinstance(value, str):
        return [_NAME, wire.REDUCTIONS.index(value)]
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
    if kind == _TUPLE:
        return tuple(_from_ints(ints) for _ in range(next(ints)))
    return next(ints) if kind == _INT else wire.REDUCTIONS[next(ints)]


def decode_plan(name: str, ints: Sequence[int], group_name: str) -> Plan:
    """Return the collective of a custom op, given the integers of `as_ints`."""
    values = iter(ints)
    plan_class = _plan_classes[name]
    group = dist.distributed_c10d._resolve_process_group(group_name)  # type: ignore[arg-type]
    return plan_class(group, *(_from_ints(values) for _ in plan_class.field_names))


def register_plan(plan_class: type[P]) -> type[P]:
    """Class decorator that defines a custom op, `gradwire::<name>`, for compiled graphs."""
    # Dynamo does not trace an autograd function with a rule for forward mode. Compiled graphs
    # contain this operator instead, whose backward is the adjoint's operator. Checks are not part
    # of the op: the public function runs them.
    name = plan_class.name
    _plan_classes[name] = plan_class
    # The decorator stands above `@dataclass`; a plan without fields of its own needs no
    # `@dataclass`.
    names = [field.name for field in fields(plan_class)]
    plan_class.field_names = tuple(name for name in names if name != "group")

    def run(x: Tensor, ints: list[int], group: str) -> Tensor:
        if weight_of_backward() != 1.0:
            raise NotSupportedError("weight(n) and collectives in a compiled backward: use eager")
        return decode_plan(name, ints, group).start(x, blocking=True).wait()

    def fake(x: Tensor, ints: list[int], group: str) -> Tensor:
        rows = decode_plan(name, ints, group).rows
        return x.new_empty((rows(x.shape[0]), *x.shape[1:]) if x.dim() else ())

    def save(ctx: Any, inputs: Any, output: Any) -> None:
        x, *encoded = inputs
        ctx.plan = decode_plan(name, *encoded)
        if ctx.plan.nonlinear:
            ctx.save_for_backward(x, output)

    def backward(ctx: Any, cotangent: Tensor) -> Any:
        gradient = ctx.plan.adjoint().apply_compiled(cotangent)
        if ctx.plan.nonlinear:
            gradient = gradient * ctx.plan.derivative(*ctx.saved_tensors).conj()
        return gradient, None, None

    schema = "(Tensor x, int[] ints, str group) -> Tensor"
    op = torch.library.custom_op(f"gradwire::{name}", run, mutates_args=(), schema=schema)
    op.register_fake(fake)
    op.register_autograd(backward, setup_context=save)
    _custom_ops[name] = op
    return plan_class


# --- calls ---

Peers = Sequence[PeerSignature] | None
"""Signatures of all ranks, if they exchanged them."""
_WILL_EXCHANGE = 1
"""Lowest bit of a mark: set if the rank will exchange signatures after a mismatch.

Ranks compare the bit too: they exchange signatures only if all of them do.
"""


@dataclass(slots=True)
class Operation:
    """One call of a collective, whose arguments are valid on this rank."""

    # The split dim is in front.
    front: Tensor
    group: ProcessGroup
    signature: Callable[[], CallSignature]
    # The result may also be another object with `apply` and `apply_async`. The call may exchange
    # sizes.
    plan: Callable[[Tensor, Peers], Any]
    # Takes the plan and the plan's result, and returns the call's result.
    finish: Callable[[Any, Any], Any] | None = None

    def run(self, check: bool | None, async_op: bool = False) -> Any:
        """Return the result or its handle; compare the call if checks are on, or free of cost."""
        requested = consistency.requested(check)
        if requested:
            return self._run_agreed(self.signature(), async_op)
        if requested is None:
            callee: Any = wire.backend_of(self.group, self.front).python or self.group
            if _sends_marks(callee):
                return self._run_marked(callee, async_op)
        return self._execute(self.front, unchecked, async_op)

    def _run_agreed(self, call: CallSignature, async_op: bool) -> Any:
        """Run after the ranks have exchanged their signatures."""
        x, context, peers = consistency.agree(self.group, self.front, call)
        return self._execute(x, context, async_op, peers)

    def _run_marked(self, callee: Any, async_op: bool) -> Any:
        """Run with a mark; exchange signatures and run again if the marks differ."""
        group, call = self.group, self.signature()
        # The number is part of the mark, so that the mark of a rank that is one call behind differs
        # even if the signatures are equal. It counts only what was submitted: a rank that raises
        # an error about its arguments stays in step.
        number = callee.submitted
        try:
            with callee.marked(_mark(call, number) | _WILL_EXCHANGE):
                context = partial(_mark_backward, group, call.op, number)
                result = self._execute(self.front, context, async_op)
        except CheckedMismatchError:
            return self._run_agreed(call, async_op)
        if not async_op:
            return result
        result._chained = True

        def finish() -> Any:
            try:
                return result.wait()
            except CheckedMismatchError:  # on all ranks
                return self._run_agreed(call, async_op=True).wait()

        return Handle(finish, call.op)

    def _execute(
        self, x: Tensor, context: CheckContext, async_op: bool, peers: Peers = None
    ) -> Any:
        plan, finish = self.plan(x, peers), self.finish
        if async_op:
            handle = plan.apply_async(x, context)
            return handle if finish is None else handle.then(lambda y: finish(plan, y))
        result = plan.apply(x, context)
        return result if finish is None else finish(plan, result)


def _mark_backward(
    group: ProcessGroup, name: str, number: int, cotangent: Tensor
) -> AbstractContextManager[None]:
    """Send a mark with the backward of a call that had one."""
    callee: Any = wire.backend_of(group, cotangent).python or group
    if not _sends_marks(callee):
        return nullcontext()
    mark = _mark(CallSignature(f"backward of {name}", None, None), number) & ~_WILL_EXCHANGE
    marked: AbstractContextManager[None] = callee.marked(mark)
    return marked


def _sends_marks(callee: Any) -> bool:
    """Return True if the backend sends marks, and has no observer, which would not expect them."""
    return hasattr(callee, "marked") and callee.observer is None


def _mark(call: CallSignature, number: int) -> int:
    if call.ragged:  # leave out what may differ between ranks: shm compares sizes itself
        shape = call.shape and call.shape[1:]
        call = call._replace(shape=shape, send=(), receive=())
    return hash((signature_hash(call), number)) | 2  # never 0, which means that there is no mark


# --- lists of tensors ---
#
# unstack does not copy. Autograd forbids in-place modification of views if a function returns
# several of them. The results of `unstack` share memory, but are not views for autograd. No element
# belongs to two of them, so that modifying one in place does not affect the others.


class _Unstack(Function):
    @staticmethod
    def forward(x: Tensor, sizes: Sequence[int], scalars: bool) -> tuple[Tensor, ...]:
        return _pieces(x, sizes, scalars)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, _, ctx.scalars = inputs

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        return torch.stack(cotangents) if ctx.scalars else concat(cotangents), None, None


_apply_unstack = eager_apply(_Unstack)


def unstack(x: Tensor, sizes: Sequence[int], scalars: bool = False) -> tuple[Tensor, ...]:
    """Split the rows of a tensor into one tensor for each size, in the memory of `x`."""
    # `x` must be contiguous and not used elsewhere: the results have its memory. For `scalars`,
    # which makes 0-d results, it has one dim, and all sizes are 1.
    if compiling(x) or is_transformed():
        pieces = x.unbind() if scalars else x.split_with_sizes(sizes)
        return tuple(piece.clone() for piece in pieces)
    if x.requires_grad:
        return _apply_unstack(x, sizes, scalars)  # type: ignore[no-any-return]
    return _pieces(x, sizes, scalars)


def concat(pieces: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Concatenate as torch.cat, with a graph for pieces of shape (0,), and huge pages."""
    if dim == 0 and not (torch.is_grad_enabled() or _is_traced(pieces)):
        rows = sum(piece.shape[0] for piece in pieces)
        return torch.cat([*pieces], out=wire.empty_rows(pieces[0], rows))
    joined = torch.cat([*pieces], dim)
    # torch.cat's backward skips pieces of shape (0,). If a second derivative continued from there
    # to a collective, other ranks, whose pieces have elements, would wait in it.
    empties = [piece for piece in pieces if piece.shape == (0,) and piece.requires_grad]
    # Subtraction keeps the sign of -0.0.
    return joined - torch.stack(empties).sum() if empties else joined


def _is_traced(xs: Sequence[Tensor]) -> bool:
    """Return True if a tracer or transform follows the computation, which rules out `out=`."""
    return compiling(xs[0]) or is_transformed() or any(is_legacy_batchedtensor(x) for x in xs)


def _pieces(x: Tensor, sizes: Sequence[int], scalars: bool) -> tuple[Tensor, ...]:
    pieces = x.unbind() if scalars else x.split_with_sizes(sizes)
    return tuple(piece.data for piece in pieces)
