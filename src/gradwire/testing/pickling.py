"""Pickles functions for processes that may be unable to import the modules that define them.

cloudpickle pickles lambdas and local functions by value, but a module's own functions and classes
by name, which fails for a test module that only pytest can import. Those go by value here too.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from functools import lru_cache
from importlib.machinery import ModuleSpec
from types import FunctionType, ModuleType
from typing import Any

from gradwire.errors import NotSupportedError

__all__ = ["dumps", "load_cloudpickle"]


def load_cloudpickle() -> ModuleType:
    """The cloudpickle module, or an error that says how to get it."""
    try:
        import cloudpickle
    except ImportError as error:
        raise NotSupportedError(
            "run_ranks sends functions with cloudpickle, which is not installed: "
            "pip install 'gradwire[test]'"
        ) from error
    module: ModuleType = cloudpickle
    return module


def dumps(value: object) -> bytes:
    """Pickle `value`, by value where a new process could not import what it refers to."""
    cloudpickle = load_cloudpickle()
    by_value: list[ModuleType] = []

    class Pickler(cloudpickle.CloudPickler):  # type: ignore[name-defined, misc]
        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, FunctionType | type):
                module = sys.modules.get(obj.__module__)
                if module is not None and not _importable(obj.__module__, tuple(sys.path)):
                    cloudpickle.register_pickle_by_value(module)
                    by_value.append(module)
            return super().reducer_override(obj)

    buffer = io.BytesIO()
    try:
        Pickler(buffer).dump(value)
    finally:
        for module in set(by_value):
            cloudpickle.unregister_pickle_by_value(module)
    return buffer.getvalue()


@lru_cache(maxsize=1024)
def _importable(name: str, path: tuple[str, ...]) -> bool:
    """Return True if a new process with this `sys.path` could import a module read from a file.

    Modules that packages create at run time (`torch.ops`, parts of extension modules) have no file;
    importing their package creates them again.
    """
    made_from = getattr(sys.modules[name], "__spec__", None)
    if made_from is None or not made_from.has_location or name == "__main__":
        return True
    search: Sequence[str] | None = None
    parts = name.split(".")
    for depth in range(1, len(parts) + 1):
        spec = _find(".".join(parts[:depth]), search)
        if spec is None:
            return False
        search = spec.submodule_search_locations
    return True


def _find(name: str, search: Sequence[str] | None) -> ModuleSpec | None:
    # importlib.util.find_spec would answer from sys.modules, which a new process does not have.
    found = (finder.find_spec(name, search) for finder in sys.meta_path)
    return next((spec for spec in found if spec is not None), None)
