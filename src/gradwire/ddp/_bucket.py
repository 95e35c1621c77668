"""The reducer's buckets: gather gradients into something flat, put the reduced values back.

A `PackedBucket` copies its gradients into a buffer of its own. An `InPlaceBucket` holds one large
gradient and is that gradient's own memory: nothing is copied.

Packing knows three sizes. A gradient of some size is taken the moment it is ready, while it is
still in the processor's cache, scaled on the way, and from then on lives in the buffer: what
autograd made is freed at once and nothing is copied back. Smaller ones do so in batches that fit
the cache, with one multi-tensor copy a batch. Tiny ones, for which a Python step each would cost
more than their bytes, are copied in with one call when the bucket is full, and out with another.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from gradwire.buckets import memory_strides, views
from gradwire.errors import NotSupportedError, ReductionError
from gradwire.gradients import GradBucket
from gradwire.shm import empty

__all__ = ["Bucket", "InPlaceBucket", "PackedBucket"]

AT_ONCE_BYTES = 32 << 10
"""From here on three Python steps cost less than reading the gradient a second time."""
ADOPT_BYTES = 4 << 10
"""From here on one Python step costs less than copying the gradient back."""
REFERENCES = 3
"""To a gradient that only its parameter holds: the parameter's, ours, and that of the count."""
BATCH_BYTES = 256 << 10
"""What is gathered at a time: well below a core's second-level cache."""


class Bucket(ABC):
    """Parameters whose gradients travel together.

    Attributes:
        members: The parameters' indices in the reducer, in the order they lie in the bucket.
        early: Those of them that want `gather_early` when their gradient is ready.
        arrived: Those whose gradient is ready in this backward, as they came.
        flat: The 1-d tensor that travels; valid from `gather` to `scatter`.
    """

    flat: Tensor
    early: Collection[int]

    def __init__(self, members: Sequence[int], parameters: Sequence[Parameter]) -> None:
        self.members = tuple(members)
        self.size = len(self.members)
        self.parameters = list(parameters)
        self.arrived: list[int] = []

    def reset(self) -> None:
        """Ready for the next backward."""
        self.arrived.clear()

    @property
    def full(self) -> bool:
        """Whether all gradients of this backward are there."""
        return len(self.arrived) >= self.size

    @abstractmethod
    def gather_early(self, member: int, incoming: Tensor) -> None:
        """Take one gradient that has just become ready; `incoming` is what backward gave it."""

    @abstractmethod
    def gather(self) -> None:
        """Make `flat` hold all gradients, scaled."""

    @abstractmethod
    def scatter(self, reduced: Tensor | None = None) -> None:
        """Make the gradients hold the reduced values: those in `flat`, or in a tensor like it."""


class InPlaceBucket(Bucket):
    """One large dense gradient, communicated in its own memory."""

    def __init__(self, member: int, parameter: Parameter, scale: float) -> None:
        super().__init__([member], [parameter])
        self.early = self.members
        self._scale = scale
        self._strides = memory_strides(parameter)
        self._copy: Tensor | None = None

    def reset(self) -> None:
        super().reset()
        self._copy = None

    def gather_early(self, member: int, incoming: Tensor) -> None:
        gradient = _gradient(self.parameters[0])
        count = gradient.numel()
        if gradient.stride() == self._strides:
            self.flat = gradient.as_strided((count,), (1,))
        else:  # autograd gives a gradient its parameter's strides; this one was put there
            self.flat = torch.empty(count, dtype=gradient.dtype, device=gradient.device)
            self._copy = views(self.flat, self.parameters, keep_strides=True)[0].copy_(gradient)
        if self._scale != 1.0:
            self.flat.mul_(self._scale)

    def gather(self) -> None:
        pass  # the one gradient came early

    def scatter(self, reduced: Tensor | None = None) -> None:
        assert reduced is None, "hooks get packed buckets"
        if self._copy is not None:
            _gradient(self.parameters[0]).copy_(self._copy)
            self._copy = None
        del self.flat


class PackedBucket(Bucket):
    """Gradients that share a buffer.

    Args:
        members: The parameters' indices.
        parameters: The parameters, of one dtype and device. Where there is a scale, those that
            come early lie first, so that the others can be scaled in one piece.
        scale: What gradients are multiplied by on their way into the buffer.
        keep: Whether gradients become views of the buffer (gradient_as_bucket_view).
        group: The group that reduces; on shm the buffer lies in memory that its ranks share.
    """

    def __init__(
        self,
        members: Sequence[int],
        parameters: Sequence[Parameter],
        *,
        scale: float = 1.0,
        keep: bool = False,
        group: ProcessGroup | None = None,
    ) -> None:
        pairs = list(zip(members, parameters, strict=True))
        if scale != 1.0:
            pairs.sort(key=lambda pair: pair[1].nbytes < AT_ONCE_BYTES)
        super().__init__([m for m, _ in pairs], [p for _, p in pairs])
        self._scale, self._keep, self._group = scale, keep, group
        self._place = {
            m: (i, p.nbytes) for i, (m, p) in enumerate(pairs) if p.nbytes >= ADOPT_BYTES
        }
        self.early = self._place.keys()
        self._tiny = [i for i, p in enumerate(self.parameters) if p.nbytes < ADOPT_BYTES]
        self._at_once = sum(p.numel() for p in self.parameters if p.nbytes >= AT_ONCE_BYTES)
        self._batch: list[int] = []
        self._batch_bytes = 0
        self._allocate()

    def _allocate(self) -> None:
        first = self.parameters[0]
        count = sum(p.numel() for p in self.parameters)
        if self._group is not None and first.device.type == "cpu":
            self.flat = empty(count, dtype=first.dtype, group=self._group)
        else:
            self.flat = torch.empty(count, dtype=first.dtype, device=first.device)
        self._views = views(self.flat, self.parameters, keep_strides=True)
        self._to_scale = self.flat[self._at_once :]  # where there is a scale, they lie last
        self._own_uses = _uses(self.flat)
        self._claimed = self._keep

    def _claim(self) -> None:
        """Before the first write of a backward: leave the buffer to whoever else still uses it.

        Gradients of the last backward lie in it. As long as they are their parameters' .grad they
        are ours to accumulate into; one that somebody kept when .grad was cleared is not.
        """
        others = _uses(self.flat) - self._own_uses
        if others:
            at_home = 0
            for place, _ in self._place.values():
                gradient = self.parameters[place].grad
                if gradient is not None:
                    at_home += gradient.data_ptr() == self._views[place].data_ptr()
            if others != at_home:
                self._allocate()
        self._claimed = True

    def reset(self) -> None:
        super().reset()
        self._claimed = self._keep
        self._batch, self._batch_bytes = [], 0

    def gather_early(self, member: int, incoming: Tensor) -> None:
        if not self._claimed:
            self._claim()
        place, size = self._place[member]
        if size < AT_ONCE_BYTES:
            self._batch.append(place)
            self._batch_bytes += size
            if self._batch_bytes >= BATCH_BYTES:
                self._gather_batch()
            return
        parameter, view = self.parameters[place], self._views[place]
        gradient = _gradient(parameter)
        if gradient.data_ptr() != view.data_ptr():
            torch.mul(gradient, self._scale, out=view)
            # autograd may have made `incoming` the gradient: then it, and the tensor that it is a
            # view of, use that memory until this backward step ends
            passing = 0
            if incoming.data_ptr() == gradient.data_ptr():
                passing = 1 + incoming._is_view()
            if self._keep:
                parameter.grad = view
            elif _uses(gradient) <= 2 + passing and sys.getrefcount(gradient) <= REFERENCES:
                gradient.set_(view)  # type: ignore[call-overload]  # torch's stub lacks this form
        elif self._scale != 1.0:
            view.mul_(self._scale)

    def _gather_batch(self) -> None:
        """Copies what has come since the last time; it is scaled when the bucket is full."""
        outside = self._outside(self._batch)
        self._batch, self._batch_bytes = [], 0
        if outside:
            torch._foreach_copy_([v for _, _, v in outside], [g for _, g, _ in outside])
            for parameter, gradient, view in outside:
                if self._keep:
                    parameter.grad = view
                elif _uses(gradient) <= 2 and sys.getrefcount(gradient) <= REFERENCES + 1:
                    gradient.set_(view)  # type: ignore[call-overload]

    def _outside(self, places: Sequence[int]) -> list[tuple[Parameter, Tensor, Tensor]]:
        """Parameter, gradient and view of those whose gradient does not lie in the buffer."""
        found = [
            (self.parameters[i], _gradient(self.parameters[i]), self._views[i]) for i in places
        ]
        return [entry for entry in found if entry[1].data_ptr() != entry[2].data_ptr()]

    def gather(self) -> None:
        self._gather_batch()
        if outside := self._outside(self._tiny):
            torch._foreach_copy_([v for _, _, v in outside], [g for _, g, _ in outside])
            if self._keep:
                for parameter, _, view in outside:
                    parameter.grad = view
        if self._scale != 1.0:
            self._to_scale.mul_(self._scale)

    def scatter(self, reduced: Tensor | None = None) -> None:
        source = self._views
        if reduced is not None and not _same_memory(reduced, self.flat):
            source = views(reduced.reshape(-1), self.parameters, keep_strides=True)
        gradients = [_gradient(p) for p in self.parameters]
        away = [i for i, g in enumerate(gradients) if g.data_ptr() != source[i].data_ptr()]
        if away:
            torch._foreach_copy_([gradients[i] for i in away], [source[i] for i in away])

    def as_grad_bucket(self, index: int, *, is_last: bool) -> GradBucket:
        """The bucket as hooks see it."""
        return GradBucket(index, self.flat, self.parameters, is_last=is_last)


def _same_memory(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.is_contiguous()


def _uses(tensor: Tensor) -> int:
    """How many tensors share this one's storage, itself included."""
    uses: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return uses


def _gradient(parameter: Parameter) -> Tensor:
    """The parameter's gradient, present and dense."""
    gradient = parameter.grad
    if gradient is None:
        raise ReductionError(
            f"the gradient of a parameter of shape {tuple(parameter.shape)} was taken away (.grad "
            "is None) before it was communicated: free gradients after backward"
        )
    if gradient.layout != torch.strided:
        raise NotSupportedError(
            f"the gradient of a parameter of shape {tuple(parameter.shape)} has layout "
            f"{gradient.layout}: use dense gradients (for an embedding, sparse=False)"
        )
    return gradient
