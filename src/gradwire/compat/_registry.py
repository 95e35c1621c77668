"""Puts objects of ours in place of PyTorch's, in every module that offers them, and back."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import ModuleType

__all__ = ["Replacement", "is_installed", "put", "put_back", "replaced"]


@dataclass(frozen=True)
class Replacement:
    """One object of ours and where it goes.

    Attributes:
        value: Ours.
        name: What PyTorch calls it.
        modules: Every module of PyTorch that holds it under that name.
        wherever_loaded: Replace it also in modules of PyTorch that are not in `modules`, which
            hold it for their own use and may not have been imported yet.
    """

    value: object
    name: str
    modules: tuple[str, ...]
    wherever_loaded: bool = False


_originals: list[tuple[str, str, object]] = []
_everywhere: list[tuple[object, object]] = []
"""Ours and PyTorch's, of what is replaced in all modules."""


def is_installed() -> bool:
    """Whether a table is in place."""
    return bool(_originals)


def replaced() -> list[object]:
    """PyTorch's own objects that ours are in the place of."""
    return [original for _, _, original in _originals]


def put(table: Iterable[Replacement]) -> None:
    """Put everything in a table in place; if one name is not there, nothing."""
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
        put_back()
        raise


def put_back() -> None:
    """Put PyTorch's own objects back."""
    _exchange({id(ours): theirs for ours, theirs in _everywhere})
    _everywhere.clear()
    while _originals:
        module_name, name, original = _originals.pop()
        setattr(importlib.import_module(module_name), name, original)


def _exchange(instead: dict[int, object]) -> None:
    """Put other objects in the place of those with these ids, in what is loaded of PyTorch."""
    for module in _modules_of_torch() if instead else ():
        for name, value in list(vars(module).items()):
            if id(value) in instead:
                setattr(module, name, instead[id(value)])


def _modules_of_torch() -> Iterator[ModuleType]:
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "torch" and isinstance(module, ModuleType):
            yield module
