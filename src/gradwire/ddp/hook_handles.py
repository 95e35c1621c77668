"""Hooks that end with what they serve: they refer to it weakly, and are removed when it is gone."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any


class WeakHook:
    """Calls a method with arguments before the caller's, as long as its object lives.

    It is its object's alone: a copy or a pickle of what it is registered with has one that does
    nothing.
    """

    def __init__(self, method: Callable[..., Any] | None = None, *first: Any) -> None:
        self._method = None if method is None else weakref.WeakMethod(method)
        self._first = first

    def __call__(self, *args: Any) -> Any:
        """The method's result; None if its object is no more."""
        method = None if self._method is None else self._method()
        return None if method is None else method(*self._first, *args)

    def __reduce__(self) -> tuple[Any, ...]:
        return WeakHook, ()


def remove_hooks(handles: Iterable[Any]) -> None:
    """Remove hooks by their handles."""
    for handle in handles:
        handle.remove()


def remove_hooks_with(owner: object, handles: Sequence[Any]) -> weakref.finalize[Any, Any]:
    """Remove hooks as soon as their owner is collected, or when the result is called.

    The hooks must hold no reference to the owner. Nothing is removed at exit, where the modules
    that would do it may be gone.
    """
    finalizer = weakref.finalize(owner, remove_hooks, handles)
    finalizer.atexit = False
    return finalizer
