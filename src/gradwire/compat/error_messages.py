"""Errors that programs written for PyTorch's classes expect.

Frameworks and scripts distinguish PyTorch's errors by class, and some by a phrase in the message.
The phrases are therefore appended to gradwire's messages, which name parameters and remedies.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy

from gradwire.errors import ArgumentError, ReductionError

T = TypeVar("T")

UNFINISHED = "Expected to have finished reduction in the prior iteration"
READY_TWICE = "Expected to mark a variable ready only once."
CHANGED = "Your training graph has changed in this iteration"
REMEDIES = (
    "passing the keyword argument `find_unused_parameters=True`",
    "making sure all `forward` function outputs participate in calculating loss",
)
DEBUG = "set the environment variable TORCH_DISTRIBUTED_DEBUG to either INFO or DETAIL"
INDICES = "Parameter indices which did not receive grad for rank"
NAMES = "Parameters which did not receive grad for rank"


class RefusedError(ArgumentError, RuntimeError):
    """ArgumentError that is also a RuntimeError, which PyTorch raises for many arguments."""


def as_runtime_error(function: Callable[..., T]) -> Callable[..., T]:
    """Return the function with argument errors that are both RuntimeErrors and ValueErrors."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> T:
        try:
            return function(*args, **kwargs)
        except ArgumentError as error:
            raise RefusedError(str(error)) from error

    return call


def constructor_error(
    error: ArgumentError, module: object, group: object, mesh: object
) -> RefusedError:
    """Return the error for invalid arguments of the constructor, with PyTorch's phrase."""
    phrase = None
    if mesh is not None:
        phrase = "Only 1D device mesh is supported, but got another"
        if group is not None:
            phrase = "Cannot specify both process_group and device_mesh arguments."
    elif isinstance(module, nn.Module) and any(map(is_lazy, module.parameters())):
        phrase = "Modules with uninitialized parameters can't be used"
    return RefusedError(_with(str(error), phrase))


def _with(text: str, phrase: str | None) -> str:
    return f"{text} (PyTorch's message: {phrase})" if phrase else text


def unexpected_gradient(error: ReductionError, *, static: bool) -> ReductionError:
    """Return the error for a second gradient, or for one that the static graph did not have."""
    phrase = CHANGED if static else READY_TWICE
    return ReductionError(_with(str(error), phrase), error.parameters)


def unfinished_reduction(
    error: ReductionError, rank: int, names: Sequence[str], *, static: bool
) -> ReductionError:
    """Return the error for a backward that skipped parameters, with PyTorch's message.

    Args:
        error: Error of gradwire; its `parameters` received no gradient.
        rank: Rank in the group.
        names: Names of all parameters, in the order of PyTorch's parameter indices.
        static: True if static_graph is set.
    """
    if not error.parameters:
        return error
    indices = " ".join(str(names.index(name)) for name in error.parameters)
    lacking = f"{NAMES} {rank}: {', '.join(error.parameters)}"
    if dist.get_debug_level() == dist.DebugLevel.OFF:
        lacking = f"for their names here, {DEBUG}"
    changed = f"; {CHANGED.lower()}" if static else ""
    theirs = f"{UNFINISHED}{changed}; {'; '.join(REMEDIES)}. {lacking}. {INDICES} {rank}: {indices}"
    return ReductionError(f"{error}\n(PyTorch's message: {theirs})", error.parameters)
