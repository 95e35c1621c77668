"""Ownership of gradient memory: whether a reducer may write to it, by counts of references.

The memory of an arriving gradient may also be queued by autograd for another branch, or be used by
another parameter's gradient, a saved tensor or the user. The reducer writes to it only if it can
account for every reference to the memory. Otherwise the gradient is copied.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from gradwire._scope import outside_contexts

holders: Callable[[Tensor], int] = Tensor._use_count  # type: ignore[attr-defined]  # not in stubs
"""Function that returns the number of C++ references to a tensor."""


class Ownership:
    """A reducer's record of gradients that must not be changed."""

    def __init__(self) -> None:
        # parameters that had a gradient before this backward: as in PyTorch, other tensors in its
        # memory must see the result. Those in memory that autograd allocated in this one need not
        self.had_gradient: set[int] = set()

    def begin(
        self,
        parameters: Sequence[Parameter],
        first: int | None = None,
        incoming: Tensor | None = None,
    ) -> None:
        """Record existing gradients as a backward begins, at parameter `first` or at an output."""
        self.had_gradient = {i for i, p in enumerate(parameters) if p.grad is not None}
        if first is not None and _is_taken(parameters[first].grad, incoming):
            self.had_gradient.discard(first)

    @staticmethod
    def may_write(gradient: Tensor, incoming: Sequence[Tensor]) -> bool:
        """Return True if only the parameter uses its gradient's memory, now and later."""
        # `incoming` has the gradient that autograd passed. It must have no other name in the
        # callers: each would count as a reference.
        if type(gradient) is not Tensor:
            return False  # a subclass may hold its values elsewhere
        storage = gradient.untyped_storage()
        if gradient.is_conj() or gradient.is_neg() or not storage.resizable():
            return False  # storage that cannot be resized belongs to an array or a file
        if holders(gradient) > ITSELF_AND_ITS_OBJECT:
            return False
        # If autograd stored the incoming gradient as `.grad`, that and the tensor that it is a view
        # of also use the memory until this step of backward ends.
        known = 1
        if _is_taken(gradient, incoming[0]):
            if holders(incoming[0]) > ITSELF_AND_ITS_OBJECT:
                return False
            if sys.getrefcount(incoming[0]) > INCOMING_REFERENCES:
                return False
            known += 1
            if incoming[0]._base is not None:
                if holders(incoming[0]._base) > ITSELF_AND_ITS_OBJECT:
                    return False  # queued for another branch or kept
                if sys.getrefcount(incoming[0]._base) > BASE_REFERENCES:
                    return False
                known += 1
        return _count(storage) == known

    def used_elsewhere(self, indices: Sequence[int], gradients: Sequence[Tensor]) -> list[bool]:
        """Return True for each new gradient whose memory other tensors use, after backward."""
        had, count = self.had_gradient, torch._C._storage_Use_Count
        return [
            i not in had and count(g.untyped_storage()._cdata) > 2  # the tensor and this object
            for i, g in zip(indices, gradients, strict=True)
        ]

    def make_private(self, parameter: Parameter, incoming: Sequence[Tensor]) -> None:
        """Give a new gradient its own memory if others use it, in backwards without reduction."""
        # The next backward adds to it in place. If two gradients shared memory, each would receive
        # both sums.
        gradient = parameter.grad
        if _is_taken(gradient, incoming[0]):
            assert gradient is not None
            if not self.may_write(gradient, incoming):
                parameter.grad = gradient.clone()


def is_zero(gradient: Tensor) -> bool:
    """Return True if all elements are zero."""
    values = gradient if gradient.layout == torch.strided else gradient.coalesce().values()
    return not bool(values.any())


def uses(tensor: Tensor) -> int:
    """Return the number of tensors that use this tensor's storage, itself included."""
    return _count(tensor.untyped_storage())


def _count(storage: torch.UntypedStorage) -> int:
    count: int = torch._C._storage_Use_Count(storage._cdata)
    return count - 1  # without this storage object


def _is_taken(gradient: Tensor | None, incoming: Tensor | None) -> bool:
    """Return True if autograd stored the incoming gradient itself as `.grad`, without a copy."""
    if gradient is None or incoming is None or incoming.layout != torch.strided:
        return False
    return gradient.layout == torch.strided and gradient.data_ptr() == incoming.data_ptr()


ITSELF_AND_ITS_OBJECT = 2
"""C++ references to a tensor: one from its place in autograd, one from its Python object."""


def _measure(more: int) -> tuple[int, int]:
    """Measure `sys.getrefcount` of tensors that C++ holds, with `more` additional references."""
    # The argument is an expression, as in the checks above. A local name or a forwarded argument
    # may or may not count as a reference: from Python 3.14 on, the interpreter borrows references.
    parameter = torch.zeros(1, device="cpu", requires_grad=True)
    parameter.grad = torch.zeros(1, device="cpu").view(1)
    incoming: Any = (parameter.grad,)
    kept = [incoming[0]] * more, [incoming[0]._base] * more
    counts = sys.getrefcount(incoming[0]), sys.getrefcount(incoming[0]._base)
    del kept
    return counts


def _references() -> tuple[int, int]:
    """Return the reference counts of tensors that only autograd and the measurement hold."""
    # The package may be imported in inference mode, where the `_base` of a view is None and has
    # thousands of references.
    with outside_contexts():
        alone, kept = _measure(0), _measure(1)
    noticed = all(k == a + 1 for a, k in zip(alone, kept, strict=True))
    # without a visible additional reference, zeros: then all gradients are copied
    return alone if noticed else (0, 0)


INCOMING_REFERENCES, BASE_REFERENCES = _references()
