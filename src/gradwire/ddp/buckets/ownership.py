"""Who else uses a gradient's memory: the one place that says what a reducer may write to.

A gradient that arrives may lie in memory that autograd has queued for another branch, that another
parameter's gradient, a saved tensor or the user looks at. It is written to only where that is ruled
out: every reference to the memory is one that is known. What cannot be ruled out is copied.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from gradwire._scope import outside_contexts

__all__ = ["Ownership", "Registration", "is_conj_or_neg", "uses"]

REDUCERS = "gradwire.ddp.reducers"


class Ownership:
    """What a reducer knows about its parameters' gradients.

    Attributes:
        shared: Indices of parameters that other reducers reduce, too: they read what is in `.grad`.
        had_gradient: Indices of those that had a gradient before this backward. What somebody else
            sees in its memory is to see the result, as after PyTorch's. Memory that autograd made
            in this backward is shared by accident.
    """

    def __init__(self) -> None:
        self.shared: set[int] = set()
        self.had_gradient: set[int] = set()
        self._ready: dict[int, Tensor] = {}
        self._unused: dict[int, Tensor | None] = {}

    def keep_local(
        self, parameters: Sequence[Parameter], pending: Iterable[int], ready: Collection[int]
    ) -> None:
        """Another reducer is about to put its results into the gradients that both reduce.

        This one sends what the rank had before, as on ranks where it has done so already.

        Args:
            parameters: All.
            pending: Those that it has not gathered yet.
            ready: Those whose gradient is there; others may turn out to be unused.
        """
        for i in self.shared.intersection(pending):
            gradient = parameters[i].grad
            kept = None if gradient is None else gradient.detach().clone()
            if i not in ready:
                self._unused.setdefault(i, kept)
            elif kept is not None:
                self._ready.setdefault(i, kept)

    def ready_gradient(self, index: int, gradient: Tensor) -> Tensor:
        """What is to be sent: the gradient, or what it was before another reducer wrote to it."""
        return self._ready.get(index, gradient)

    def unused_gradient(self, index: int, gradient: Tensor | None) -> Tensor | None:
        """As `ready_gradient`, where the backward brought none: what has accumulated before."""
        return self._unused.get(index, gradient)

    def clear(self) -> None:
        """The backward is over."""
        self._ready.clear()
        self._unused.clear()

    def begin(
        self,
        parameters: Sequence[Parameter],
        first: int | None = None,
        incoming: Tensor | None = None,
    ) -> None:
        """A backward begins, at an output, or when the gradient of `first` is ready."""
        self.had_gradient = {i for i, p in enumerate(parameters) if p.grad is not None}
        if first is not None and _is_taken(parameters[first].grad, incoming):
            self.had_gradient.discard(first)

    def may_write(self, index: int, gradient: Tensor, incoming: Sequence[Tensor]) -> bool:
        """Whether nobody but the parameter reads its gradient's memory, now or later.

        `incoming` holds what backward gave the parameter, and nobody has a name for that. If it was
        made the gradient, then it, and the tensor that it is a view of, use the memory until this
        step of backward ends.
        """
        if type(gradient) is not Tensor:
            return False  # a subclass may hold its values elsewhere
        storage = gradient.untyped_storage()
        if index in self.shared or is_conj_or_neg(gradient) or not storage.resizable():
            return False  # what cannot be resized is not torch's: an array's, a file's
        if _holders(gradient) > ITSELF_AND_ITS_OBJECT:
            return False
        known = 1
        if _is_taken(gradient, incoming[0]):
            if _holders(incoming[0]) > ITSELF_AND_ITS_OBJECT:
                return False
            if sys.getrefcount(incoming[0]) > INCOMING_REFERENCES:
                return False
            known += 1
            if incoming[0]._base is not None:
                if _holders(incoming[0]._base) > ITSELF_AND_ITS_OBJECT:
                    return False  # queued for another branch, or kept
                if sys.getrefcount(incoming[0]._base) > BASE_REFERENCES:
                    return False
                known += 1
        return _count(storage) == known

    def may_move(self, index: int, parameter: Parameter, *, names: int, over: bool = False) -> bool:
        """Whether the gradient's tensor may be pointed at other memory.

        Args:
            index: The parameter's.
            parameter: Which has a gradient.
            names: How many references the caller has to it: local names, tuples that hold it.
            over: Whether backward has ended, and other reducers have read it.
        """
        if index in self.shared and not over:
            return False
        # no name for it here: see `_references`
        if sys.getrefcount(parameter.grad) > GRADIENT_REFERENCES + names:
            return False  # who has it may have taken its address
        gradient = parameter.grad
        assert gradient is not None
        if type(gradient) is not Tensor or _holders(gradient) > ITSELF_AND_ITS_OBJECT:
            return False
        return index not in self.had_gradient or uses(gradient) == 1

    def is_used_elsewhere(self, index: int, gradient: Tensor) -> bool:
        """Whether, after backward, a gradient that is new lies in memory that others use."""
        return index not in self.had_gradient and uses(gradient) > 1

    def used_elsewhere(self, indices: Sequence[int], gradients: Sequence[Tensor]) -> list[bool]:
        """`is_used_elsewhere` for each: 0.2 µs instead of 0.5, for thousands of tiny gradients."""
        had, count = self.had_gradient, torch._C._storage_Use_Count
        return [
            i not in had and count(g.untyped_storage()._cdata) > 2  # its own, and this object
            for i, g in zip(indices, gradients, strict=True)
        ]

    def make_private(self, index: int, parameter: Parameter, incoming: Sequence[Tensor]) -> None:
        """Outside of reductions: give a new gradient memory of its own if others read its.

        The next backward adds to it: two gradients in one memory would each be added to both.
        """
        gradient = parameter.grad
        if _is_taken(gradient, incoming[0]):
            assert gradient is not None
            if not self.may_write(index, gradient, incoming):
                parameter.grad = gradient.clone()


class Registration:
    """A reducer's entry at the nodes of its parameters, by which several learn of each other."""

    def __init__(self, nodes: Sequence[Any], ownership: Ownership) -> None:
        self._nodes, self._ownership = nodes, weakref.ref(ownership)
        for i, node in enumerate(nodes):
            self._entries(node).append((self._ownership, i))
            self._tell(node)

    def remove(self) -> None:
        """The reducer reduces no more."""
        for node in self._nodes:
            entries = self._entries(node)
            entries[:] = [e for e in entries if e[0] is not self._ownership]
            self._tell(node)

    @staticmethod
    def _entries(node: Any) -> list[tuple[weakref.ref[Ownership], int]]:
        entries: list[tuple[weakref.ref[Ownership], int]] = node.metadata.setdefault(REDUCERS, [])
        return entries

    def _tell(self, node: Any) -> None:
        entries = self._entries(node)
        for reference, index in entries:
            if ownership := reference():
                (ownership.shared.add if len(entries) > 1 else ownership.shared.discard)(index)


def is_conj_or_neg(tensor: Tensor) -> bool:
    """Whether the values are conjugated or negated only when they are read."""
    return tensor.is_conj() or tensor.is_neg()


def uses(tensor: Tensor) -> int:
    """How many tensors share this one's storage, itself included."""
    return _count(tensor.untyped_storage())


def _count(storage: torch.UntypedStorage) -> int:
    count: int = torch._C._storage_Use_Count(storage._cdata)
    return count - 1  # without the object in our hands


def _is_taken(gradient: Tensor | None, incoming: Tensor | None) -> bool:
    """Whether autograd made what came in the gradient, instead of adding it or copying it."""
    if gradient is None or incoming is None or incoming.layout != torch.strided:
        return False
    return gradient.layout == torch.strided and gradient.data_ptr() == incoming.data_ptr()


def _holders(tensor: Tensor) -> int:
    """How many references there are to the tensor itself in C++."""
    count: int = tensor._use_count()  # type: ignore[attr-defined]  # torch's stub lacks it
    return count


ITSELF_AND_ITS_OBJECT = 2
"""References to a tensor in C++: from where it belongs, and from its Python object."""


def _measure(more: int) -> tuple[int, int, int]:
    """Return what `sys.getrefcount` says of tensors that C++ holds, with so many more references.

    Asked for as where it counts: by an expression. A name may count as a reference or not, as may
    an argument that was passed on: from Python 3.14 on, the interpreter borrows what a caller has.
    """
    parameter, other = (torch.zeros(1, device="cpu", requires_grad=True) for _ in range(2))
    parameter.grad = torch.zeros(1, device="cpu")
    other.grad = torch.zeros(1, device="cpu").view(1)
    incoming: Any = (other.grad,)
    kept = [incoming[0]] * more, [incoming[0]._base] * more, [parameter.grad] * more
    counts = (
        sys.getrefcount(incoming[0]),
        sys.getrefcount(incoming[0]._base),
        sys.getrefcount(parameter.grad),
    )
    del kept
    return counts


def _references() -> tuple[int, int, int]:
    """Return the counts of tensors that nobody else has; zeros, so that all is copied, if unsure.

    In inference mode, in which the package may be imported, a view has no base: `_base` is None,
    which has thousands of references.
    """
    with outside_contexts():
        alone, kept = _measure(0), _measure(1)
    noticed = all(k == a + 1 for a, k in zip(alone, kept, strict=True))
    return alone if noticed else (0, 0, 0)


INCOMING_REFERENCES, BASE_REFERENCES, GRADIENT_REFERENCES = _references()
