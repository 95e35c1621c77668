"""Handles of asynchronous collectives, which are two autograd nodes: a start and a wait.

The start returns a token, from which the wait makes the result. In backward, the wait runs first
and starts the adjoint collective, for which the start then waits. Computation between the two
overlaps with communication in both passes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, Generic, Literal, TypedDict, TypeVar

import torch
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor
from torch.autograd import Function
from torch.distributed import ProcessGroup

from gradwire.collectives.args.validation import refuse_split
from gradwire.collectives.autograd.linear_collective import (
    LinearCollective,
    apply_linear,
    graph_is_needed,
    is_transformed,
)
from gradwire.collectives.checks.consistency import CheckContext
from gradwire.collectives.wire import Pending

T = TypeVar("T")
S = TypeVar("S")


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

    def retried(self, on: type[Exception], repeat: Callable[[], T]) -> Handle[T]:
        """Return a handle that calls `repeat` if this one's `wait` raises the given error."""
        self._chained = True

        def finish() -> T:
            try:
                return self.wait()
            except on:
                return repeat()

        return Handle(finish, self._name)

    def __del__(self) -> None:
        if getattr(self, "_finish", None) is not None and not self._chained:
            warnings.warn(
                f"a handle of {self._name} was dropped without wait(): its result, and the "
                "gradient through it, are lost",
                ResourceWarning,
                stacklevel=2,
            )


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
        self.pending: Pending | None = None
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
                adjoint.result = apply_linear(ctx.plan.adjoint(), cotangent, ctx.check)
                token = torch.zeros((), dtype=cotangent.dtype, device=cotangent.device)
                return token, None, None, None
            return _Start.apply(cotangent, ctx.plan.adjoint(), adjoint, ctx.check), None, None, None  # type: ignore[no-untyped-call]


def apply_or_start(plan: LinearCollective, x: Tensor, context: CheckContext, async_op: bool) -> Any:
    """Return the collective's result, or a handle of it."""
    if not async_op:
        return apply_linear(plan, x, context)
    refuse_split(x)
    if not graph_is_needed(x):
        return Handle(plan.start(x).wait, plan.name)
    state = AsyncState()
    token = _Start.apply(x, plan, state, context)  # type: ignore[no-untyped-call]
    return handle_of_token(token, plan, state, context)


def handle_of_token(
    token: Tensor, plan: LinearCollective, state: AsyncState, context: CheckContext
) -> Handle[Tensor]:
    """Return a handle for a collective that was started, given its token."""

    def finish() -> Tensor:
        return _Wait.apply(token, plan, state, context)  # type: ignore[no-any-return, no-untyped-call]

    return Handle(finish, plan.name)


def then(result: Any, fn: Callable[[Any], Any]) -> Any:
    """Apply `fn` to a result, now or, given a handle, when it is waited for."""
    return result.then(fn) if isinstance(result, Handle) else fn(result)


class _Options(TypedDict, total=False):
    """Keyword arguments that overloads of every collective with `async_op` unpack (PEP 692).

    They tell type checkers if a call returns its result or a `Handle`.
    """

    group: ProcessGroup | None
    check: bool | None


class Sync(_Options, total=False):
    """Options of a call that returns its result."""

    async_op: Literal[False]


class Async(_Options):
    """Options of a call with `async_op=True`, which returns a handle."""

    async_op: Literal[True]
