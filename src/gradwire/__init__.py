"""Gradwire: the communication layer of data-parallel PyTorch training.

This module exports the names that most training scripts use. The packages `gradwire.hooks`,
`gradwire.collectives`, `gradwire.ddp`, `gradwire.devices`, `gradwire.errors`, `gradwire.recorder`
and `gradwire.shm` export the others. They are imported together with this module, or on first use
in a program that has not imported torch yet. `gradwire.compat`, `gradwire.elastic`,
`gradwire.local_sgd` and `gradwire.testing` are always imported on first use.
"""

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

from gradwire import _gloo_threads
from gradwire._version import __version__

if TYPE_CHECKING:
    from gradwire import shm
    from gradwire.collectives import all_gather, all_reduce
    from gradwire.ddp import DistributedDataParallel
    from gradwire.devices import DataParallel
    from gradwire.errors import GradwireError
    from gradwire.hooks import GradBucket
    from gradwire.recorder import timeline

del _gloo_threads  # imported to register its exit handler

__all__ = [
    "DataParallel",
    "DistributedDataParallel",
    "GradBucket",
    "GradwireError",
    "__version__",
    "all_gather",
    "all_reduce",
    "shm",
    "timeline",
]

_PACKAGES = ("collectives", "ddp", "devices", "errors", "hooks", "recorder", "shm")
_ON_USE = ("compat", "elastic", "local_sgd", "testing")
_HOMES = {
    "DataParallel": "devices",
    "DistributedDataParallel": "ddp",
    "GradBucket": "hooks",
    "GradwireError": "errors",
    "all_gather": "collectives",
    "all_reduce": "collectives",
    "timeline": "recorder",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES and name not in (*_PACKAGES, *_ON_USE):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = _HOMES.get(name, name)
    if home != "errors":
        import torch  # noqa: F401  # first: with GRADWIRE_COMPAT=1 it imports parts of gradwire
    module = importlib.import_module(f"{__name__}.{home}")
    value = getattr(module, name) if name in _HOMES else module
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES, *_PACKAGES, *_ON_USE})


def _may_wait() -> bool:
    """Return True if torch is not imported yet and will register "shm" when it is imported."""
    if "torch" in sys.modules or os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") != "1":
        return False
    if any(name.startswith("GRADWIRE_") for name in os.environ):  # `import torch` imports gradwire
        return False
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        return distribution(__name__).entry_points is not None
    except PackageNotFoundError:
        return False


if not _may_wait():
    for _name in (*_PACKAGES, *_HOMES):
        __getattr__(_name)
    del _name
