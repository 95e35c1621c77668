"""Hooks that reference their owner weakly, and are removed once it is collected."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any


class WeakHook:
    """Callable that calls a method, with leading arguments, while its object is alive.

    Copies and pickles of it do nothing, so that a copied module does not call the original's hooks.
    """

    def __init__(self, method: Callable[..., Any] | None = None, *first: Any) -> None:
        self._method = None if method is None else weakref.WeakMethod(method)
        self._first = first

    def __call__(self, *args: Any) -> Any:
        """Return the method's result; None if its object was collected."""
        method = None if self._method is None else self._method()
        return None if method is None else method(*self._first, *args)

    def __reduce__(self) -> tuple[Any, ...]:
        return WeakHook, ()


def remove_hooks(handles: Iterable[Any]) -> None:
    """Remove hooks by their handles."""
    for handle in handles:
        handle.remove()


def remove_hooks_with(owner: object, handles: Sequence[Any]) -> weakref.finalize[Any, Any]:
    """Remove hooks once their owner is collected, or when the returned finalizer is called.

    The hooks must hold no reference to the owner. Nothing is removed at exit, when the modules
    needed for it may be gone.
    """
    finalizer = weakref.finalize(owner, remove_hooks, handles)
    finalizer.atexit = False
    return finalizer
