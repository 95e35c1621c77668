"""CommHook: what a communication hook is."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias, runtime_checkable

from torch import Tensor
from torch.distributed import Work
from torch.futures import Future

from gradwire.errors import ArgumentTypeError

__all__ = ["CommHook", "HookReturn", "check_hook", "hook_name"]

HookReturn: TypeAlias = "Future[Any] | Tensor | list[Tensor] | Work"
"""What a hook may return: of a future or a work handle, the result is a tensor or a list of one."""


@runtime_checkable
class CommHook(Protocol):
    """A communication hook: takes a bucket of local gradients, gives the reduced ones.

    Called once for each bucket of a backward, in the same order on every rank. It divides by the
    world size itself. Functions, `functools.partial` and callable objects will do.
    """

    def __call__(self, state: Any, bucket: Any, /) -> Any:
        """Start communicating `bucket`; return a `HookReturn` with a tensor like its buffer."""
        ...


def check_hook(hook: object) -> CommHook:
    """The hook, if it can be called with a state and a bucket.

    Raises:
        ArgumentTypeError: Not callable, a coroutine function, or with other parameters.
    """
    if not callable(hook):
        raise ArgumentTypeError(f"hook is {hook!r}: pass a callable hook(state, bucket)")
    if inspect.iscoroutinefunction(hook) or inspect.iscoroutinefunction(type(hook).__call__):
        raise ArgumentTypeError(
            f"hook {hook_name(hook)} is a coroutine function: return a torch.futures.Future instead"
        )
    try:
        inspect.signature(hook).bind(None, None)
    except ValueError:
        return hook  # a built-in without a signature
    except TypeError as error:
        raise ArgumentTypeError(
            f"hook {hook_name(hook)} cannot be called as hook(state, bucket): {error}"
        ) from None
    return hook


def hook_name(hook: Callable[..., object]) -> str:
    """A hook's name for messages."""
    inner = getattr(hook, "func", hook)
    return str(getattr(inner, "__qualname__", type(inner).__qualname__))
