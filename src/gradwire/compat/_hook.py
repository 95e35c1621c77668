"""Communication hooks as PyTorch's class takes them: what it refuses, and what they raise."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.compat._wording import RefusedError
from gradwire.errors import DistributedError, HookError
from gradwire.hooks import CommHook, GradBucket, HookReturn, hook_name
from gradwire.hooks.stateful import DelegatingHook

__all__ = ["RaisesItsOwn", "StatefulRaisesItsOwn", "check_annotations"]

BUCKETS = (dist.GradBucket, GradBucket, Any)
RETURNS = (torch.futures.Future[Tensor], torch.futures.Future[Any], HookReturn, Any)


def check_annotations(hook: Callable[..., object]) -> None:
    """Refuses what PyTorch refuses: a bucket or a result that is annotated as something else.

    Raises:
        RefusedError: A ValueError, with PyTorch's words.
    """
    function = hook if inspect.isroutine(hook) else type(hook).__call__
    try:
        names = list(inspect.signature(hook).parameters)
    except ValueError:
        return  # a built-in
    found = {name: _meant(a, function) for name, a in _annotations(function).items()}
    bucket = found.get(names[1], Any) if len(names) > 1 else Any
    if bucket not in BUCKETS:
        raise RefusedError(
            f"hook {hook_name(hook)} takes a {bucket} (PyTorch's words: Communication hook: bucket "
            "annotation should be dist.GradBucket.)"
        )
    if found.get("return", Any) not in RETURNS:
        raise RefusedError(
            f"hook {hook_name(hook)} returns {found['return']} (PyTorch's words: Communication "
            "hook: return annotation should be torch.futures.Future[torch.Tensor].)"
        )


def _annotations(function: object) -> dict[str, Any]:
    return getattr(function, "__annotations__", None) or {}


def _meant(annotation: Any, function: object) -> Any:
    """What an annotation that may be text stands for; Any if that cannot be found out."""
    if not isinstance(annotation, str):
        return annotation
    try:
        return eval(annotation, getattr(function, "__globals__", {}))
    except Exception:  # imported for type checkers only, for example
        return Any


class RaisesItsOwn:
    """A hook whose exceptions are of their own class, and HookErrors too."""

    def __init__(self, hook: CommHook) -> None:
        functools.update_wrapper(self, hook, updated=())
        self.hook = hook

    def __getattr__(self, name: str) -> Any:
        if name == "hook" or name.startswith("__"):  # not there yet while it is unpickled
            raise AttributeError(name)
        return getattr(self.hook, name)

    def __call__(self, state: Any, bucket: Any, /) -> Any:
        """Calls the hook."""
        with _own_errors(self.hook):
            return self.hook(state, bucket)


class StatefulRaisesItsOwn(DelegatingHook):
    """As `RaisesItsOwn`, for a hook with a state of its own."""

    def run_hook(self, bucket: GradBucket) -> HookReturn:
        """Runs the hook."""
        with _own_errors(self.hook):
            return self.hook.run_hook(bucket)

    def parse_hook_result(self, result: Any) -> Tensor:
        """Reads a result as the hook does."""
        with _own_errors(self.hook):
            return self.hook.parse_hook_result(result)


@contextmanager
def _own_errors(hook: CommHook) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        # what engines raise is for the reducer to tell from the hook's own
        if isinstance(error, DistributedError | dist.DistError) or type(error) is RuntimeError:
            raise
        raise _own(error, hook) from error


def _own(error: Exception, hook: CommHook) -> HookError:
    """A HookError of the same class as another error, with its arguments and attributes."""
    kind = type(error)
    text = f"hook {hook_name(hook)} raised {kind.__name__}: {error}"
    try:
        both = type(kind.__name__, (HookError, kind), {"__str__": lambda _: text})
        own: HookError = kind.__new__(both, *error.args)
        native = next(base for base in kind.__mro__ if base.__module__ == "builtins")
        cast("Any", native).__init__(own, *error.args)  # an OSError's errno, for example
    except TypeError:  # classes that cannot be joined, or that are made in another way
        return HookError(text)
    own.args = error.args
    own.__dict__.update(error.__dict__)
    return own
