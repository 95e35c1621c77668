"""Handles of asynchronous collectives, and the types of the options that return them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Generic, Literal, TypedDict, TypeVar

from torch.distributed import ProcessGroup

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
