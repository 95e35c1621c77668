"""Handles of collectives under way; both passes are split into a start and a wait.

`start` gives a token, `wait` turns the token into the result. In backward the wait, which comes
first there, starts the adjoint collective, and the start waits for it: what was computed between
the two in forward overlaps with communication in both passes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from torch import Tensor
from torch.autograd import Function

from gradwire.collectives.args.transforms import refuse_split
from gradwire.collectives.autograd.linear import Linear, graph_is_needed, linear
from gradwire.collectives.checks.consistency import Note, in_backward
from gradwire.collectives.wire import Pending

__all__ = ["Handle", "Ticket", "after", "run", "waited"]

T = TypeVar("T")
S = TypeVar("S")


class Handle(Generic[T]):
    """A collective under way; `wait` gives its result.

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

    def __init__(self, finish: Callable[[], T], what: str) -> None:
        self._finish: Callable[[], T] | None = finish
        self._what = what
        self._result: T | None = None
        self._error: Exception | None = None
        self._handed_on = False

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
        self._handed_on = True
        return Handle(lambda: fn(self.wait()), self._what)

    def retried(self, on: type[Exception], again: Callable[[], T]) -> Handle[T]:
        """A handle that, if this one's `wait` raises such an error, gives the result of `again`."""
        self._handed_on = True

        def finish() -> T:
            try:
                return self.wait()
            except on:
                return again()

        return Handle(finish, self._what)

    def __del__(self) -> None:
        if getattr(self, "_finish", None) is not None and not self._handed_on:
            warnings.warn(
                f"a handle of {self._what} was dropped without wait(): its result is lost, and so "
                "is the gradient through it",
                ResourceWarning,
                stacklevel=2,
            )


class Ticket:
    """What the two halves of a split collective share."""

    __slots__ = ("adjoint", "kept", "pending")

    def __init__(self) -> None:
        self.pending: Pending | None = None
        self.adjoint: Ticket | None = None
        self.kept: Tensor | None = None

    def take(self) -> Tensor:
        """The result, when it has arrived."""
        assert self.pending is not None
        pending, self.pending = self.pending, None
        return pending.wait()

    def pulled(self, token: Tensor, adjoint: Linear, note: Note | None) -> Tensor:
        """In backward: what the adjoint collective, started by the wait, has brought."""
        ticket, self.adjoint = self.adjoint, None
        assert ticket is not None
        return _Wait.apply(token, adjoint, ticket, note)  # type: ignore[no-any-return, no-untyped-call]


class _Start(Function):
    """The front half: from the tensor to a token."""

    @staticmethod
    def forward(x: Tensor, op: Linear, ticket: Ticket, note: Note | None) -> Tensor:
        ticket.pending = op.start(x)
        return x.new_zeros(())  # a number, because shapes differ between the two passes

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, ctx.op, ctx.ticket, ctx.note = inputs

    @staticmethod
    def backward(ctx: Any, token: Tensor) -> Any:
        return ctx.ticket.pulled(token, ctx.op.adjoint(), ctx.note), None, None, None


class _Wait(Function):
    """The back half: from the token to the result."""

    @staticmethod
    def forward(token: Tensor, op: Linear, ticket: Ticket, note: Note | None) -> Tensor:
        return ticket.take()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, ctx.op, ctx.ticket, ctx.note = inputs

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        ctx.ticket.adjoint = adjoint = Ticket()
        with in_backward(ctx.note, cotangent):
            return _Start.apply(cotangent, ctx.op.adjoint(), adjoint, ctx.note), None, None, None  # type: ignore[no-untyped-call]


def run(op: Linear, x: Tensor, note: Note | None, async_op: bool) -> Any:
    """The collective's result, or its handle."""
    if not async_op:
        return linear(op, x, note)
    refuse_split()
    if not graph_is_needed(x):
        return Handle(op.start(x).wait, op.name)
    ticket = Ticket()
    token = _Start.apply(x, op, ticket, note)  # type: ignore[no-untyped-call]
    return waited(token, op, ticket, note)


def waited(token: Tensor, op: Linear, ticket: Ticket, note: Note | None) -> Handle[Tensor]:
    """A handle whose `wait` turns a token into the result of the collective that was started."""

    def finish() -> Tensor:
        return _Wait.apply(token, op, ticket, note)  # type: ignore[no-any-return, no-untyped-call]

    return Handle(finish, op.name)


def after(result: Any, fn: Callable[[Any], Any]) -> Any:
    """`fn` of a result, or of what a handle will give."""
    return result.then(fn) if isinstance(result, Handle) else fn(result)
