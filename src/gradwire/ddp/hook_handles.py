"""Handles of hooks, removed when what the hooks serve is no more."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

__all__ = ["remove_hooks", "remove_hooks_with"]


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
