"""Replacement and restoration of PyTorch's objects, and errors that their callers expect.

Objects are replaced in every module that exports them. Frameworks and scripts distinguish PyTorch's
errors by class, and some by a phrase in the message. The phrases are therefore appended to
gradwire's messages, which name parameters and remedies.
"""

from __future__ import annotations

import functools
import importlib
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, TypeVar

import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy

from gradwire.errors import ArgumentError, BoundEarlyWarning, ReductionError


@dataclass(frozen=True)
class Replacement:
    """Object of gradwire, and the names that it is assigned to."""

    value: object
    # Name in PyTorch, and the modules of PyTorch that export it under that name.
    name: str
    modules: tuple[str, ...]
    # True to replace it in all loaded modules of PyTorch, besides `modules`, which may not have
    # been imported yet.
    wherever_loaded: bool = False


_originals: list[tuple[str, str, object]] = []
_everywhere: list[tuple[object, object]] = []
"""Pairs of gradwire's and PyTorch's objects, for entries with `wherever_loaded`."""


def is_installed() -> bool:
    """Return True if PyTorch's objects are currently replaced."""
    return bool(_originals)


def originals() -> list[object]:
    """Return PyTorch's objects that are currently replaced."""
    return [original for _, _, original in _originals]


def replace(table: Iterable[Replacement]) -> None:
    """Assign every object of a table, or none if a name does not exist."""
    try:
        for entry in table:
            if entry.wherever_loaded:
                original = getattr(importlib.import_module(entry.modules[0]), entry.name)
                _everywhere.append((entry.value, original))
            for module_name in entry.modules:
                module = importlib.import_module(module_name)
                _originals.append((module_name, entry.name, getattr(module, entry.name)))
                setattr(module, entry.name, entry.value)
        _exchange({id(theirs): ours for ours, theirs in _everywhere})
    except BaseException:
        restore()
        raise


def restore() -> None:
    """Restore PyTorch's objects, in reverse order, because a name may be in two entries."""
    _exchange({id(ours): theirs for ours, theirs in _everywhere})
    _everywhere.clear()
    while _originals:
        module_name, name, original = _originals.pop()
        setattr(importlib.import_module(module_name), name, original)


def _exchange(by_id: dict[int, object]) -> None:
    """Replace objects, given by id, in every loaded module of PyTorch."""
    for module_name, module in list(sys.modules.items()) if by_id else ():
        if module_name.partition(".")[0] == "torch" and isinstance(module, ModuleType):
            for name, value in list(vars(module).items()):
                if id(value) in by_id:
                    setattr(module, name, by_id[id(value)])


OWN = {"torch", "gradwire", "gradwire_autoload"}
SHOWN = 8


def modules_holding(objects: Iterable[object]) -> dict[str, list[str]]:
    """Return the names of the objects in modules other than PyTorch's and gradwire's."""
    # Values in `vars(module)` are compared by identity, without running `__getattr__`. This takes
    # 30 ms with torch and seven frameworks imported (6,100 modules, and 178,000 names outside
    # torch).
    ids = {id(value) for value in objects}
    found: dict[str, list[str]] = {}
    seen: set[int] = set()
    for name, module in list(sys.modules.items()):
        if (
            name.partition(".")[0] in OWN
            or not isinstance(module, ModuleType)
            or id(module) in seen
        ):
            continue
        seen.add(id(module))  # a module may have two names: a script is also `__main__`
        held = [key for key, value in list(vars(module).items()) if id(value) in ids]
        if held:
            found[name] = held
    return found


def warn_of_early_imports(objects: Iterable[object], stacklevel: int) -> None:
    """Warn about modules that have one of PyTorch's objects, with their names."""
    found = [f"{name} ({', '.join(held)})" for name, held in modules_holding(objects).items()]
    if not found:
        return
    more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    warnings.warn(
        "modules imported before gradwire.compat.install() keep PyTorch's own objects: "
        f"{', '.join(found[:SHOWN])}{more}. Call install() before they are imported, or "
        "start the program with GRADWIRE_COMPAT=1 in its environment",
        BoundEarlyWarning,
        stacklevel=stacklevel + 1,
    )


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
    return RefusedError(with_phrase(str(error), phrase))


def with_phrase(text: str, phrase: str | None) -> str:
    """Return the text with PyTorch's phrase, if there is one."""
    return f"{text} (PyTorch's message: {phrase})" if phrase else text


def unfinished_reduction(
    error: ReductionError, rank: int, names: Sequence[str], *, static: bool
) -> ReductionError:
    """Return the error for a backward that skipped parameters, with PyTorch's message."""
    if not error.parameters:
        return error
    # `names` has all parameters, in the order of PyTorch's parameter indices.
    indices = " ".join(str(names.index(name)) for name in error.parameters)
    lacking = f"{NAMES} {rank}: {', '.join(error.parameters)}"
    if dist.get_debug_level() == dist.DebugLevel.OFF:
        lacking = f"for their names here, {DEBUG}"
    changed = f"; {CHANGED.lower()}" if static else ""
    theirs = f"{UNFINISHED}{changed}; {'; '.join(REMEDIES)}. {lacking}. {INDICES} {rank}: {indices}"
    return ReductionError(f"{error}\n(PyTorch's message: {theirs})", error.parameters)
