"""Errors as programs that were written for PyTorch's class expect them.

Frameworks and scripts tell PyTorch's errors apart by class, and some by a phrase in their text. So
our messages, which name parameters and remedies, are followed by the phrases that are looked for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy

from gradwire.errors import ArgumentError, ReductionError

__all__ = ["RefusedError", "as_torchs", "refused", "surplus", "unfinished"]

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
    """An argument cannot be used; a RuntimeError too, as which PyTorch raises many."""


def as_torchs(
    function: Callable[..., T], words: Callable[..., str | None] | None = None
) -> Callable[..., T]:
    """The function with errors of arguments that are RuntimeErrors besides ValueErrors.

    Args:
        function: Ours.
        words: From the same arguments, the phrase that programs look for, if there is one.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> T:
        try:
            return function(*args, **kwargs)
        except ArgumentError as error:
            phrase = None if words is None else words(*args, **kwargs)
            raise RefusedError(_with(str(error), phrase)) from error

    return call


def refused(error: ArgumentError, module: object, group: object, mesh: object) -> RefusedError:
    """The error of a constructor that cannot use its arguments."""
    words = None
    if mesh is not None:
        words = "Only 1D device mesh is supported, but got another"
        if group is not None:
            words = "Cannot specify both process_group and device_mesh arguments."
    elif isinstance(module, nn.Module) and any(map(is_lazy, module.parameters())):
        words = "Modules with uninitialized parameters can't be used"
    return RefusedError(_with(str(error), words))


def _with(text: str, words: str | None) -> str:
    return f"{text} (PyTorch's words: {words})" if words else text


def surplus(error: ReductionError, *, static: bool) -> ReductionError:
    """The error of a gradient that is one too many, or with a static graph was never there."""
    words = CHANGED if static else READY_TWICE
    return ReductionError(_with(str(error), words), error.parameters)


def unfinished(
    error: ReductionError, rank: int, names: Sequence[str], *, static: bool
) -> ReductionError:
    """The error of a backward that left parameters out, with what PyTorch says of it.

    Args:
        error: Ours; its `parameters` got no gradient.
        rank: In the group.
        names: All parameters, in the order in which PyTorch counts them.
        static: Whether the graph was to stay as it was.
    """
    if not error.parameters:
        return error
    indices = " ".join(str(names.index(name)) for name in error.parameters)
    told = f"{NAMES} {rank}: {', '.join(error.parameters)}"
    if dist.get_debug_level() == dist.DebugLevel.OFF:
        told = f"for their names here, {DEBUG}"
    changed = f"; {CHANGED.lower()}" if static else ""
    words = f"{UNFINISHED}{changed}; {'; '.join(REMEDIES)}. {told}. {INDICES} {rank}: {indices}"
    return ReductionError(f"{error}\n(PyTorch's words: {words})", error.parameters)
