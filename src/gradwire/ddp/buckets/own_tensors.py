"""Tensors that are handed out in one backward after the other.

To make a tensor for each of thousands of tiny gradients, and to free it, takes 1 µs: as long as
autograd takes to add to it. So they are kept, and are handed out again if nobody else has one and
none was altered: then nobody can tell them from new ones, but for their version.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from operator import attrgetter

import torch
from torch import Tensor

from gradwire._scope import outside_contexts

__all__ = ["OwnTensors"]


class OwnTensors:
    """Tensors that lie in views, each with a version of its own.

    As views, they would share one: each would count as changed with any other.

    Args:
        views: In which they lie.
    """

    def __init__(self, views: Sequence[Tensor] = ()) -> None:
        self._views = views
        self._tensors: list[Tensor] = []

    def __len__(self) -> int:
        return len(self._tensors)

    def get(self) -> Sequence[Tensor]:
        """A tensor for each view."""
        if not self._tensors:
            self._tensors = [view.data for view in self._views]
        return self._tensors

    def are_unused(self) -> bool:
        """Whether nobody else has one of them, and all are as they were made."""
        tensors, count = self._tensors, len(self._tensors)
        # a sum is enough, as none is below what one in the list alone has; the passes are by
        # functions in C, 0.3 µs for each tensor in all
        return (
            sum(map(sys.getrefcount, tensors)) == count * _REFERENCES
            and sum(map(_holders, tensors)) == count * _HOLDERS
            and all(map(Tensor.is_set_to, tensors, self._views))
            and not any(map(_requires_grad, tensors))
            and not any(map(_attributes, tensors))
            and not any(map(weakref.getweakrefcount, tensors))
        )

    def clear(self) -> None:
        """Make new ones the next time."""
        self._tensors = []


_holders = Tensor._use_count  # type: ignore[attr-defined]  # torch's stub lacks it
_requires_grad = attrgetter("requires_grad")
_attributes = attrgetter("__dict__")


def _counts() -> tuple[int, int]:
    """References to a tensor that one list has, in Python and in C++, as `are_unused` sees them.

    Zeros, so that no tensor is handed out again, if another reference is not noticed.
    """
    with outside_contexts():
        tensors = [torch.empty(0, dtype=torch.float32, device="cpu").data]
    counts = sum(map(sys.getrefcount, tensors)), sum(map(_holders, tensors))
    kept = [*tensors]
    noticed = sum(map(sys.getrefcount, tensors)) == counts[0] + len(kept)
    return counts if noticed else (0, 0)


_REFERENCES, _HOLDERS = _counts()
