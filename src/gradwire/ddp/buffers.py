"""How a module's buffers are synchronized: rank 0's everywhere, or merged by a function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from gradwire.ddp.broadcast import broadcast_coalesced
from gradwire.errors import ArgumentTypeError

__all__ = ["BufferHook", "Buffers"]

BufferHook = Callable[[dict[str, Tensor], ProcessGroup], Any]
"""Changes buffers, by name, in place; may return a future or several, which are waited for."""


class Buffers:
    """A module's buffers.

    Args:
        module: The module.
        names: The buffers that are synchronized.

    Attributes:
        hook: Merges the buffers; None: rank 0's are taken.
        after_forward: Whether the hook runs after each training forward, and not before.
    """

    def __init__(self, module: nn.Module, names: Sequence[str]) -> None:
        self._module = module
        self._names = list(names)
        self._paths = [name.split(".") for name in names]
        self.hook: BufferHook | None = None
        self.after_forward = False

    def __bool__(self) -> bool:
        return bool(self._names)

    def named(self) -> dict[str, Tensor]:
        """The buffers as they are now: a module may put others in their place."""
        found = {}
        for name, path in zip(self._names, self._paths, strict=True):
            # get_buffer would look each step up in all kinds of attributes: ten times as long
            owner: nn.Module | None = self._module
            for part in path[:-1]:
                owner = None if owner is None else owner._modules.get(part)
            buffer = None if owner is None else owner._buffers.get(path[-1])
            found[name] = self._module.get_buffer(name) if buffer is None else buffer
        return found

    def set_hook(self, hook: BufferHook, *, after_forward: bool) -> None:
        """Let a function merge the buffers.

        Raises:
            ArgumentTypeError: It cannot be called.
        """
        if not callable(hook):
            raise ArgumentTypeError(f"hook is {hook!r}: pass a callable hook(buffers, group)")
        self.hook, self.after_forward = hook, after_forward

    def sync(self, group: ProcessGroup, *, root: int = 0) -> None:
        """Make the buffers equal on all ranks."""
        named = self.named()
        buffers = tuple(named.values())
        # a graph whose backward is yet to come may have saved them, and would raise for another
        # version; the module's own forward writes to them, too
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(buffers):
            if self.hook is None:
                broadcast_coalesced(group, buffers, group_src=root)
                return
            returned = self.hook(named, group)
            for future in returned if isinstance(returned, list | tuple) else (returned,):
                if isinstance(future, torch._C.Future):
                    future.wait()
