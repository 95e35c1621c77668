"""PyTorch's names and signatures for gradwire, for use without changing a program.

`install()` replaces PyTorch's functions by gradwire's in every module of PyTorch that exports them.
Names that another module has already bound by `from torch… import …` are not changed: a warning
lists these modules.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from gradwire.compat import replacements
from gradwire.compat.collectives import TABLE as _COLLECTIVES
from gradwire.compat.ddp import TABLE as _DDP
from gradwire.compat.devices import TABLE as _DEVICES

__all__ = ["install", "installed", "uninstall"]

_TABLES = (_COLLECTIVES, _DDP, _DEVICES)


def install() -> None:
    """Replace PyTorch's functions and classes by gradwire's; do nothing if they are replaced.

    Modules that have already imported one of them keep PyTorch's; a `BoundEarlyWarning` lists them.

    Example:
        >>> import torch
        >>> install()
        >>> torch.nn.parallel.comm.reduce_add([torch.ones(2), torch.ones(2)])
        tensor([2., 2.])
        >>> uninstall()
    """
    _install(stacklevel=2)


def uninstall() -> None:
    """Restore PyTorch's own functions and classes; do nothing if none is replaced."""
    replacements.restore()


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """Context manager that replaces PyTorch's functions and classes inside the block.

    Example:
        >>> import torch
        >>> with installed():
        ...     torch.nn.DataParallel(torch.nn.Linear(2, 1), ["cpu"] * 2)(torch.ones(4, 2)).shape
        torch.Size([4, 1])
    """
    before = replacements.is_installed()
    _install(stacklevel=3)  # skip contextlib's frame
    try:
        yield
    finally:
        if not before:
            uninstall()


def _install(stacklevel: int) -> None:
    if not replacements.is_installed():
        replacements.replace(entry for table in _TABLES for entry in table)
        replacements.warn_of_early_imports(replacements.originals(), stacklevel + 1)
