"""Replaces PyTorch's objects by ours, in every module that offers them, and restores them."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import ModuleType

from gradwire.errors import BoundEarlyWarning


@dataclass(frozen=True)
class Replacement:
    """One object of ours, and the names it is assigned to.

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
"""Ours and PyTorch's, for entries with `wherever_loaded`."""


def is_installed() -> bool:
    """Whether PyTorch's objects are replaced now."""
    return bool(_originals)


def originals() -> list[object]:
    """PyTorch's own objects that are replaced now."""
    return [original for _, _, original in _originals]


def replace(table: Iterable[Replacement]) -> None:
    """Assign every object of a table; if one of its names does not exist, none."""
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
    """Assign PyTorch's own objects again, in reverse order: a name may be in two entries."""
    _exchange({id(ours): theirs for ours, theirs in _everywhere})
    _everywhere.clear()
    while _originals:
        module_name, name, original = _originals.pop()
        setattr(importlib.import_module(module_name), name, original)


def _exchange(by_id: dict[int, object]) -> None:
    """Replace objects, found by their id, in every module of PyTorch that is loaded."""
    for module in _modules_of_torch() if by_id else ():
        for name, value in list(vars(module).items()):
            if id(value) in by_id:
                setattr(module, name, by_id[id(value)])


def _modules_of_torch() -> Iterator[ModuleType]:
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "torch" and isinstance(module, ModuleType):
            yield module


OWN = {"torch", "gradwire", "gradwire_autoload"}
SHOWN = 8


def modules_holding(objects: Iterable[object]) -> dict[str, list[str]]:
    """The modules, other than PyTorch's and gradwire's, with an attribute that is one of these.

    30 ms of CPU time where torch and seven frameworks are imported (6,100 modules, and 178,000
    names outside torch): values in `vars(module)` are compared by identity, no `__getattr__` runs.

    Returns:
        Each module's name, with the names in it.
    """
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
        seen.add(id(module))  # one module may have two names: a script is also `__main__`
        held = [key for key, value in list(vars(module).items()) if id(value) in ids]
        if held:
            found[name] = held
    return found


def warn_of_early_imports(objects: Iterable[object], stacklevel: int) -> None:
    """Warn, naming them, of modules that hold one of these objects of PyTorch."""
    found = [f"{name} ({', '.join(held)})" for name, held in modules_holding(objects).items()]
    if not found:
        return
    more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    warnings.warn(
        "modules imported before gradwire.compat.install() hold PyTorch's own objects, and keep "
        f"them: {', '.join(found[:SHOWN])}{more}. Call install() before they are imported, or "
        "start the program with GRADWIRE_COMPAT=1 in its environment",
        BoundEarlyWarning,
        stacklevel=stacklevel + 1,
    )
