"""Communication hooks with PyTorch's rules for annotations and exceptions."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.compat.error_messages import RefusedError
from gradwire.errors import DistributedError, HookError
from gradwire.hooks import (
    CommHook,
    DelegatingHook,
    GradBucket,
    HookReturn,
    StatefulHook,
    bind_hook,
    check_hook,
    hook_name,
)

BUCKETS = (dist.GradBucket, GradBucket, Any)
RETURNS = (torch.futures.Future[Tensor], torch.futures.Future[Any], HookReturn, Any)


def adapt_hook(state: object, hook: Any) -> Any:
    """Wrap a hook so that its exceptions keep their class; return other objects unchanged.

    Raises:
        RefusedError: The hook's annotations are wrong; a ValueError with PyTorch's message.
        ArgumentTypeError: `hook` is not a hook.
        ArgumentError: The state given with a `StatefulHook` is not its own.
    """
    if isinstance(hook, StatefulHook):
        bind_hook(state, hook)
        return StatefulErrorPreservingHook(hook)
    if callable(hook):
        _check_annotations(hook)
        return ErrorPreservingHook(check_hook(hook))
    return hook


def _check_annotations(hook: Callable[..., object]) -> None:
    """Raise if PyTorch would reject the annotation of the bucket or the result."""
    function = hook if inspect.isroutine(hook) else type(hook).__call__
    try:
        names = list(inspect.signature(hook).parameters)
    except ValueError:
        return  # a built-in has no signature
    found = {name: _evaluated(a, function) for name, a in _annotations(function).items()}
    bucket = found.get(names[1], Any) if len(names) > 1 else Any
    if bucket not in BUCKETS:
        raise RefusedError(
            f"hook {hook_name(hook)} takes a {bucket} (PyTorch's message: Communication hook: "
            "bucket annotation should be dist.GradBucket.)"
        )
    if found.get("return", Any) not in RETURNS:
        raise RefusedError(
            f"hook {hook_name(hook)} returns {found['return']} (PyTorch's message: Communication "
            "hook: return annotation should be torch.futures.Future[torch.Tensor].)"
        )


def _annotations(function: object) -> dict[str, Any]:
    return getattr(function, "__annotations__", None) or {}


def _evaluated(annotation: Any, function: object) -> Any:
    """Evaluate an annotation that is a string; return Any if this fails."""
    if not isinstance(annotation, str):
        return annotation
    try:
        return eval(annotation, getattr(function, "__globals__", {}))
    except Exception:  # for example, a name that is imported for type checkers only
        return Any


class ErrorPreservingHook:
    """Hook whose exceptions keep their class, as in PyTorch, and are also HookErrors."""

    def __init__(self, hook: CommHook) -> None:
        functools.update_wrapper(self, hook, updated=())
        self.hook = hook

    def __getattr__(self, name: str) -> Any:
        if name == "hook" or name.startswith("__"):  # unpickling asks before `hook` is set
            raise AttributeError(name)
        return getattr(self.hook, name)

    def __call__(self, state: Any, bucket: Any, /) -> Any:
        """Call the hook."""
        with _errors_as_raised(self.hook):
            return self.hook(state, bucket)


class StatefulErrorPreservingHook(DelegatingHook):
    """`ErrorPreservingHook` for a `StatefulHook`."""

    def run_hook(self, bucket: GradBucket) -> HookReturn:
        """Run the hook."""
        with _errors_as_raised(self.hook):
            return self.hook.run_hook(bucket)

    def parse_hook_result(self, result: Any) -> Tensor:
        """Parse a result as the hook does."""
        with _errors_as_raised(self.hook):
            return self.hook.parse_hook_result(result)


@contextmanager
def _errors_as_raised(hook: CommHook) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        # Keep a backend's failure unchanged: its type tells the reducer that the hook is not at
        # fault.
        if isinstance(error, DistributedError | dist.DistError) or type(error) is RuntimeError:
            raise
        raise _with_own_class(error, hook) from error


def _with_own_class(error: Exception, hook: CommHook) -> HookError:
    """Return a HookError that also has the class, arguments and attributes of another error."""
    kind = type(error)
    text = f"hook {hook_name(hook)} raised {kind.__name__}: {error}"
    try:
        both = type(kind.__name__, (HookError, kind), {"__str__": lambda _: text})
        own: HookError = kind.__new__(both, *error.args)
        native = next(base for base in kind.__mro__ if base.__module__ == "builtins")
        cast("Any", native).__init__(own, *error.args)  # sets, for example, an OSError's errno
    except TypeError:  # the class cannot be a second base, or takes other arguments
        return HookError(text)
    own.args = error.args
    own.__dict__.update(error.__dict__)
    return own
