"""Synchronization of a module's buffers: broadcast from rank 0, or merged by a function."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.modules import module as torch_module

from gradwire._scope import outside_contexts
from gradwire.ddp.broadcast import broadcast_values
from gradwire.ddp.buckets.ownership import holders, uses
from gradwire.ddp.hook_handles import WeakHook, remove_hooks_with
from gradwire.ddp.layouts import dense_parts
from gradwire.errors import ArgumentTypeError

BufferHook = Callable[[dict[str, Tensor], ProcessGroup], Any]
"""Function that changes buffers in place, given by name. It may return futures to wait for."""


class Buffers:
    """The current buffers of a module.

    Args:
        module: Module with the buffers.
        ignored: Names of buffers that are not synchronized.

    Attributes:
        hook: Function that merges the buffers; None if all ranks take rank 0's values.
        after_forward: True if the hook runs after each training forward instead of before it.
    """

    def __init__(self, module: nn.Module, ignored: Collection[str] = ()) -> None:
        self._module, self._ignored = module, ignored
        self.hook: BufferHook | None = None
        self.after_forward = False
        self._seen: dict[str, weakref.ref[Tensor]] = {}
        self._aliased: set[str] = set()
        self._find()
        self._watch()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_seen": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._watch()

    def __bool__(self) -> bool:
        if self._changed:
            self._find()
        return bool(self._paths)

    def _watch(self) -> None:
        # named_buffers() at each forward would take three times as long as looking up names
        hook = WeakHook(self._on_registration)
        handles = [
            torch_module.register_module_buffer_registration_hook(hook),
            torch_module.register_module_module_registration_hook(hook),
        ]
        remove_hooks_with(self, handles)

    def _on_registration(self, owner: nn.Module, name: str, value: Any) -> None:
        # a value that replaces an existing buffer is found by its name
        if value is not None and owner._buffers.get(name) is None:
            self._changed = True

    def _find(self) -> None:
        """Find the names of the buffers, and those that share memory."""
        self._changed = False
        named = {n: b for n, b in self._module.named_buffers() if n not in self._ignored}
        self._paths = {name: name.split(".") for name in named}
        self._aliased = {name for name, buffer in named.items() if self._shares(name, buffer)}
        self._seen = {name: weakref.ref(buffer) for name, buffer in named.items()}

    def _shares(self, name: str, buffer: Tensor) -> bool:
        """Return True if a buffer shares its memory with other tensors.

        The first answer is kept: later, a graph may have saved the buffer.
        """
        seen = self._seen.get(name)
        if seen is not None and seen() is buffer:
            return name in self._aliased
        return _is_aliased(buffer)

    def named(self) -> dict[str, Tensor]:
        """Return the buffers by name, without those that were deleted or set to None."""
        if self._changed:
            self._find()
        found = {}
        for name, path in self._paths.items():
            owner: nn.Module | None = self._module
            for part in path[:-1]:
                owner = None if owner is None else owner._modules.get(part)
            buffer = None if owner is None else owner._buffers.get(path[-1])
            if buffer is not None:
                found[name] = buffer
        return found

    def set_hook(self, hook: BufferHook, *, after_forward: bool) -> None:
        """Merge the buffers with a function from now on.

        Raises:
            ArgumentTypeError: `hook` is not callable.
        """
        if not callable(hook):
            raise ArgumentTypeError(f"hook is {hook!r}: pass a callable hook(buffers, group)")
        self.hook, self.after_forward = hook, after_forward

    def sync(self, group: ProcessGroup, *, root: int = 0) -> None:
        """Make the buffers equal on all ranks.

        A graph whose backward has not run yet keeps its saved values.
        """
        named = self.named()
        with torch.inference_mode(False), torch.no_grad():
            held: dict[str, Tensor] = {}
            if self.hook is not None or group.rank() != root:  # the root's buffers are not written
                held = {n: b for n, b in named.items() if self._is_held(n, b)}
            written = {**named, **{n: _copy(b) for n, b in held.items()}} if held else named
            if self.hook is None:
                broadcast_values(group, written.items(), group_src=root)
            else:
                returned = self.hook(written, group)
                for future in returned if isinstance(returned, list | tuple) else (returned,):
                    if isinstance(future, torch._C.Future):
                        future.wait()
            for name, buffer in held.items():
                _take_values(buffer, written[name])

    def _is_held(self, name: str, buffer: Tensor) -> bool:
        """Return True if a buffer must not be written in place now.

        A graph may have saved it or a view of it, or it was made in inference mode.
        """
        return (_holders(buffer) > 1 and name not in self._aliased) or buffer.is_inference()


def _copy(buffer: Tensor) -> Tensor:
    """Return a copy that is expanded like the buffer, so that all ranks send the same bytes."""
    if buffer.layout != torch.strided:
        return buffer.clone()
    (distinct,) = dense_parts(buffer)
    if distinct.shape == buffer.shape:
        return buffer.clone()
    return distinct.clone().expand(buffer.shape).detach()  # detached, so that it is not a view


def _take_values(buffer: Tensor, values: Tensor) -> None:
    """Give a buffer new values; other references to it keep the old ones."""
    if _have_same_bits(buffer, values):
        return
    if buffer.is_inference():
        with torch.inference_mode():
            if buffer.layout == torch.strided:  # an expanded one is not written as a whole
                (buffer,), (values,) = dense_parts(buffer), dense_parts(values)
            buffer.copy_(values)
    else:
        # the Python object, which modules and users reference, gets the new memory; a graph saves
        # the C++ tensor, which keeps the old memory
        torch._C._swap_tensor_impl(buffer, values)


def _have_same_bits(a: Tensor, b: Tensor) -> bool:
    pairs = [(p, q) for p, q in zip(dense_parts(a), dense_parts(b), strict=True)]
    if any(p.shape != q.shape for p, q in pairs):
        return False
    return all(torch.equal(_bytes(p), _bytes(q)) for p, q in pairs)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.resolve_conj().resolve_neg().unsqueeze(-1).view(torch.uint8)


def _is_aliased(buffer: Tensor) -> bool:
    """Return True if other tensors share the buffer's memory: then it is written in place.

    A view that holds the only reference to its base, such as `torch.ones(1).expand(5)`, does not.
    """
    base_held = buffer._is_view() and _base_references(buffer) > _UNSHARED_BASE
    shares = buffer.layout == torch.strided and uses(buffer) > 1 + buffer._is_view()
    return shares or base_held or _holders(buffer) > 1


def _base_references(view: Tensor) -> int:
    """Return the number of references to the Python object of a view's base."""
    return sys.getrefcount(view._base)


with outside_contexts():
    _UNSHARED_BASE = _base_references(torch.empty(1, dtype=torch.float32).view(1))
    """References to a base that only its view holds."""


def _holders(tensor: Tensor) -> int:
    """Return the number of C++ references to a tensor, including that of its Python object.

    A reference to a view of the tensor counts: a view of a view holds the base.
    """
    count = holders(tensor)
    if tensor._is_view():
        # less those of the view itself and of the Python object
        count += holders(tensor._base) - 2  # type: ignore[arg-type]
    return count
