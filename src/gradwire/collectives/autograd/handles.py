"""Handles of asynchronous collectives, which are two autograd nodes: a start and a wait.

The start gives a token, the wait turns the token into the result. In backward the wait, which runs
first there, starts the adjoint collective, and the start waits for it: what was computed between
the two in forward overlaps with communication in both passes.
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
    """An asynchronous collective; `wait` gives its result.

    Until then the input is in use: do not change it.

    A handle that is dropped without `wait` warns: the other ranks may wait in backward for a part
    of the graph that does not exist here.

    Example:
        >>> from gradwire.collectives import all_reduce
        >>> def main():
        ...     handle = all_reduce(torch.ones(2), async_op=True)
        ...     # what is computed here overlaps with the collective
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
        """The result, differentiable; the same one, or the same error, if called again."""
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
        """A handle of `fn` of the result; this one needs no `wait` any more."""
        self._chained = True
        return Handle(lambda: fn(self.wait()), self._name)

    def retried(self, on: type[Exception], repeat: Callable[[], T]) -> Handle[T]:
        """A handle that gives the result of `repeat` if this one's `wait` raises such an error."""
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
                f"a handle of {self._name} was dropped without wait(): its result is lost, and so "
                "is the gradient through it",
                ResourceWarning,
                stacklevel=2,
            )


class AsyncState:
    """What the start and the wait of one asynchronous collective share, on this rank.

    Attributes:
        pending: The collective, from the start to the wait.
        adjoint: In backward, the state of the adjoint collective, from the wait to the start.
        result: A copy of the result, if backward needs it. In backward, the adjoint collective's,
            if that was not split into a start and a wait.
    """

    __slots__ = ("adjoint", "pending", "result")

    def __init__(self) -> None:
        self.pending: Pending | None = None
        self.adjoint: AsyncState | None = None
        self.result: Tensor | None = None

    def wait(self) -> Tensor:
        """The result, when the collective is complete."""
        assert self.pending is not None
        pending, self.pending = self.pending, None
        return pending.wait()

    def wait_adjoint(
        self, token: Tensor, adjoint: LinearCollective, context: CheckContext
    ) -> Tensor:
        """In backward: the result of the adjoint collective, which the wait's backward started."""
        state, self.adjoint = self.adjoint, None
        assert state is not None
        if state.result is not None:
            return state.result
        return _Wait.apply(token, adjoint, state, context)  # type: ignore[no-any-return, no-untyped-call]


class _Start(Function):
    """From the tensor to a token: starts the collective."""

    @staticmethod
    def forward(
        x: Tensor, plan: LinearCollective, state: AsyncState, context: CheckContext
    ) -> Tensor:
        state.pending = plan.start(x)
        return x.new_zeros(())  # 0-d, because shapes differ between forward and backward

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, ctx.plan, ctx.state, ctx.check = inputs

    @staticmethod
    def backward(ctx: Any, token: Tensor) -> Any:
        return ctx.state.wait_adjoint(token, ctx.plan.adjoint(), ctx.check), None, None, None


class _Wait(Function):
    """From the token to the result: waits for the collective."""

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
        # Backward runs this first. The backward of _Start waits: what autograd runs in between
        # overlaps with the adjoint collective.
        ctx.state.adjoint = adjoint = AsyncState()
        with ctx.check.backward(cotangent):
            if is_legacy_batchedtensor(cotangent) or is_transformed():
                # Of such cotangents (is_grads_batched, forward mode) only the whole has rules.
                adjoint.result = apply_linear(ctx.plan.adjoint(), cotangent, ctx.check)
                token = torch.zeros((), dtype=cotangent.dtype, device=cotangent.device)
                return token, None, None, None
            return _Start.apply(cotangent, ctx.plan.adjoint(), adjoint, ctx.check), None, None, None  # type: ignore[no-untyped-call]


def apply_or_start(plan: LinearCollective, x: Tensor, context: CheckContext, async_op: bool) -> Any:
    """The collective's result, or its handle."""
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
    """A handle whose `wait` turns the token of a collective that was started into its result."""

    def finish() -> Tensor:
        return _Wait.apply(token, plan, state, context)  # type: ignore[no-any-return, no-untyped-call]

    return Handle(finish, plan.name)


def then(result: Any, fn: Callable[[Any], Any]) -> Any:
    """`fn` of a result; of a handle, a handle of `fn` of its result."""
    return result.then(fn) if isinstance(result, Handle) else fn(result)


class _Options(TypedDict, total=False):
    group: ProcessGroup | None
    check: bool | None


class Sync(_Options, total=False):
    """The options of a call that returns its result."""

    async_op: Literal[False]


class Async(_Options):
    """The options of a call that returns a handle: `async_op=True` is given."""

    async_op: Literal[True]
