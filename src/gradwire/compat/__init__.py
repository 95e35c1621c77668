"""PyTorch's own names and signatures over gradwire: change nothing but one call.

`install()` replaces PyTorch's functions by gradwire's in every module of PyTorch that offers them.
Names that a `from torch… import …` has bound in another module before are not changed: a warning
names those modules.
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
    """Replace PyTorch's functions and classes by gradwire's; without effect if they are already.

    Modules that imported one of them before keep PyTorch's: `BoundEarlyWarning` names them.

    Example:
        >>> import torch
        >>> install()
        >>> torch.nn.parallel.comm.reduce_add([torch.ones(2), torch.ones(2)])
        tensor([2., 2.])
        >>> uninstall()
    """
    _install(stacklevel=2)


def uninstall() -> None:
    """Restore PyTorch's own functions and classes; without effect if nothing is replaced."""
    replacements.restore()


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """Replace PyTorch's functions and classes inside the block; afterwards all is as before it.

    Example:
        >>> import torch
        >>> with installed():
        ...     torch.nn.DataParallel(torch.nn.Linear(2, 1), ["cpu"] * 2)(torch.ones(4, 2)).shape
        torch.Size([4, 1])
    """
    before = replacements.is_installed()
    _install(stacklevel=3)  # past contextlib's frame
    try:
        yield
    finally:
        if not before:
            uninstall()


def _install(stacklevel: int) -> None:
    if not replacements.is_installed():
        replacements.replace(entry for table in _TABLES for entry in table)
        replacements.warn_of_early_imports(replacements.originals(), stacklevel + 1)
