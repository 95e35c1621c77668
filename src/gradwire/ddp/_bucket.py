"""The reducer's buckets: gather gradients into something flat, put the reduced values back.

A `PackedBucket` copies its gradients into a buffer of its own. An `InPlaceBucket` holds one large
gradient and is that gradient's own memory: nothing is copied.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from gradwire.buckets import memory_strides, views
from gradwire.errors import NotSupportedError, ReductionError
from gradwire.gradients import GradBucket

__all__ = ["Bucket", "InPlaceBucket", "PackedBucket"]


class Bucket(ABC):
    """Parameters whose gradients travel together.

    Attributes:
        members: The parameters' indices in the reducer, in the order they lie in the bucket.
        arrived: The indices of those whose gradient is ready in this backward, as they came.
        flat: The 1-d tensor that travels; valid from `gather` to `scatter`.
    """

    flat: Tensor

    def __init__(self, members: Sequence[int], parameters: Sequence[Parameter]) -> None:
        self.members = tuple(members)
        self.size = len(self.members)
        self.parameters = list(parameters)
        self.arrived: list[int] = []

    @property
    def full(self) -> bool:
        """Whether all gradients of this backward are there."""
        return len(self.arrived) >= self.size

    @abstractmethod
    def gather(self) -> None:
        """Make `flat` hold the gradients."""

    @abstractmethod
    def scatter(self, reduced: Tensor | None = None) -> None:
        """Make the gradients hold the reduced values: those in `flat`, or in a tensor like it."""

    def gradients(self) -> list[Tensor]:
        """The parameters' gradients, each present and dense."""
        grads = [p.grad for p in self.parameters]
        for p, g in zip(self.parameters, grads, strict=True):
            if g is None:
                raise ReductionError(
                    f"the gradient of a parameter of shape {tuple(p.shape)} was taken away (.grad "
                    "is None) before it was communicated: free gradients after backward"
                )
            if g.layout != torch.strided:
                raise NotSupportedError(
                    f"the gradient of a parameter of shape {tuple(p.shape)} has layout {g.layout}: "
                    "use dense gradients (for an embedding, sparse=False)"
                )
        return grads  # type: ignore[return-value]


class InPlaceBucket(Bucket):
    """One large dense gradient, communicated in its own memory."""

    def __init__(self, member: int, parameter: Parameter) -> None:
        super().__init__([member], [parameter])
        self._strides = memory_strides(parameter)
        self._copy: Tensor | None = None

    def gather(self) -> None:
        (gradient,) = self.gradients()
        count = gradient.numel()
        if gradient.stride() == self._strides:
            self.flat = gradient.as_strided((count,), (1,))
            return
        # autograd gives a gradient its parameter's strides; this one was put there otherwise
        self.flat = torch.empty(count, dtype=gradient.dtype, device=gradient.device)
        self._copy = views(self.flat, self.parameters, keep_strides=True)[0].copy_(gradient)

    def scatter(self, reduced: Tensor | None = None) -> None:
        assert reduced is None, "hooks get packed buckets"
        if self._copy is not None:
            self.gradients()[0].copy_(self._copy)
            self._copy = None
        del self.flat


class PackedBucket(Bucket):
    """Gradients that share a buffer.

    Args:
        members: The parameters' indices.
        parameters: The parameters, of one dtype and device.
        keep: Whether gradients become views of the buffer (gradient_as_bucket_view).
    """

    def __init__(
        self, members: Sequence[int], parameters: Sequence[Parameter], *, keep: bool
    ) -> None:
        super().__init__(members, parameters)
        first = self.parameters[0]
        count = sum(p.numel() for p in self.parameters)
        self.flat = torch.empty(count, dtype=first.dtype, device=first.device)
        self._views = views(self.flat, self.parameters, keep_strides=True)
        self._keep = keep

    def gather(self) -> None:
        grads, places = self.gradients(), self._views
        if self._keep:
            outside = [i for i, g in enumerate(grads) if g is not places[i]]
            grads, places = [grads[i] for i in outside], [places[i] for i in outside]
            for i in outside:
                self.parameters[i].grad = self._views[i]
        if grads:
            torch._foreach_copy_(places, grads)

    def scatter(self, reduced: Tensor | None = None) -> None:
        source = self._views
        if reduced is not None and not _same_memory(reduced, self.flat):
            source = views(reduced.reshape(-1), self.parameters, keep_strides=True)
        elif self._keep:
            return
        torch._foreach_copy_(self.gradients(), source)

    def as_grad_bucket(self, index: int, *, is_last: bool) -> GradBucket:
        """The bucket as hooks see it."""
        return GradBucket(index, self.flat, self.parameters, is_last=is_last)


def _same_memory(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.is_contiguous()
