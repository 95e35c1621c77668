"""PyTorch's own names and signatures over gradwire: change nothing but one call.

`install()` puts gradwire's functions where PyTorch's are, in every module of PyTorch that offers
them. Names that a `from torch… import …` bound before are the importing module's own, and stay:
a warning says whose.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from gradwire.compat import _early, _registry
from gradwire.compat.collectives import TABLE as _COLLECTIVES
from gradwire.compat.ddp import TABLE as _DDP
from gradwire.compat.devices import TABLE as _DEVICES

__all__ = ["install", "installed", "uninstall"]

_TABLES = (_COLLECTIVES, _DDP, _DEVICES)


def install() -> None:
    """Put gradwire in place of PyTorch; nothing if it is there already.

    Modules that took a name from PyTorch before keep PyTorch's: `BoundEarlyWarning` names them.

    Example:
        >>> import torch
        >>> install()
        >>> torch.nn.parallel.comm.reduce_add([torch.ones(2), torch.ones(2)])
        tensor([2., 2.])
        >>> uninstall()
    """
    _install(stacklevel=2)


def uninstall() -> None:
    """Put PyTorch's own functions back; nothing if they are there."""
    _registry.put_back()


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """Gradwire is in place of PyTorch inside the block; what was there before is after it.

    Example:
        >>> import torch
        >>> with installed():
        ...     torch.nn.DataParallel(torch.nn.Linear(2, 1), ["cpu"] * 2)(torch.ones(4, 2)).shape
        torch.Size([4, 1])
    """
    before = _registry.is_installed()
    _install(stacklevel=3)  # past contextlib's frame
    try:
        yield
    finally:
        if not before:
            uninstall()


def _install(stacklevel: int) -> None:
    if not _registry.is_installed():
        _registry.put(entry for table in _TABLES for entry in table)
        _early.warn_of_holders(_registry.replaced(), stacklevel + 1)
