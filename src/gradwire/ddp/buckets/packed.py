"""Bucket of dense gradients that share a buffer.

On the CPU, a large gradient is copied in and scaled as soon as it is ready, while it is in the
processor's cache. The others are copied in by one call when the bucket is ready. After the
reduction, one call copies all of them out, into their own memory. With `gradient_as_bucket_view`,
gradients become views of the buffer instead.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from gradwire.buckets import views
from gradwire.ddp.buckets.bucket import (
    Bucket,
    BucketContext,
    Member,
    dense_gradient,
    with_history,
)
from gradwire.shm import empty

AT_ONCE_BYTES = 32 << 10
"""Minimum size of a large gradient. From this size, three Python calls cost less than more passes
over memory."""


class PackedBucket(Bucket):
    """Bucket of dense gradients of one dtype and device that share a buffer."""

    def __init__(
        self, members: Sequence[Member], scale: float, context: BucketContext, *, extra_numel: int
    ) -> None:
        on_cpu = members[0].parameter.device.type == "cpu"
        # the order must be the same on all ranks: it depends on sizes, not on this rank's counts
        if scale != 1.0:
            # large ones first, so that one call scales the others
            members = sorted(members, key=lambda m: m.parameter.nbytes < AT_ONCE_BYTES)
        # Gradients of Tensor subclasses keep their class; their values may be in inner tensors.
        plain = all(type(m.parameter) is Parameter for m in members)
        self._as_views = context.options.gradient_as_bucket_view and plain
        self._group, self._lazy = context.group, context.options.lazy
        self.extra_numel = extra_numel
        self._views: list[Tensor] = []  # empty without a buffer
        # Positions of large gradients, by parameter index, and of the others. On an H100, copying
        # 50 large gradients one by one took 3 ms of a step of 55.
        large = [on_cpu and m.parameter.nbytes >= AT_ONCE_BYTES for m in members]
        self._large = {m.index: i for i, m in enumerate(members) if large[i]}
        self._small = [i for i, is_large in enumerate(large) if not is_large]
        early = [m.index for m in members if m.index in self._large and m.count == 1]
        super().__init__(members, scale, context, early)
        if not self._lazy:
            self._allocate()

    def _allocate(self) -> None:
        first = self.parameters[0]
        count = sum(p.numel() for p in self.parameters) + self.extra_numel
        if first.device.type == "cpu":
            self.flat = empty(count, dtype=first.dtype, group=self._group)
        else:
            self.flat = torch.empty(count, dtype=first.dtype, device=first.device)
        self._views = views(self.flat, self.like)
        self.extra = self.flat[count - self.extra_numel :]

    def reset(self) -> None:
        super().reset()
        # gradients of unused members that are views, from before the reduction
        self._saved: dict[int, Tensor] = {}
        if self._lazy and self._views:  # until the next backward, only views keep the buffer
            self.record_use()
            del self.flat, self.extra
            self._views = []

    def copy_in_early(self, member: int, incoming: Sequence[Tensor]) -> None:
        if not self._views:
            self._allocate()
        place = self._large[member]
        gradient, view = dense_gradient(self.parameters[place]), self._views[place]
        if not self._is_view(place, gradient):
            torch.mul(gradient, self.scale, out=view)
            self._set_view(place)
        elif self.scale != 1.0:
            view.mul_(self.scale)

    def _is_view(self, place: int, gradient: Tensor) -> bool:
        return self._as_views and gradient.data_ptr() == self._views[place].data_ptr()

    def _set_view(self, place: int) -> None:
        if self._as_views and not self._with_graph:
            self.parameters[place].grad = self._views[place]

    def copy_in(self) -> None:
        if not self._views:
            self._allocate()
        absent = set()
        for i in self._unused_places():
            gradient = self.parameters[i].grad
            if gradient is None:
                absent.add(i)
                self._views[i].zero_()
            elif self._as_views:
                self._saved[i] = gradient.detach().clone()
        for member, i in self._large.items():
            if i not in absent and (member not in self.early or member in self.unused):
                self.copy_in_early(member, ())
        places, gradients = self._outside([i for i in self._small if i not in absent])
        if places:
            torch._foreach_copy_([self._views[i] for i in places], gradients)
        if self._as_views:
            for i in places:
                self._set_view(i)
        if self.scale != 1.0 and self._small:
            # with a scale, they are the last ones
            start = sum(self.parameters[i].numel() for i in self._large.values())
            self.flat[start:].mul_(self.scale)

    def _unused_places(self) -> list[int]:
        return [i for i, m in enumerate(self.members) if m in self.unused] if self.unused else []

    def zero(self) -> None:
        if self._as_views or not self._views:  # gradients of the last backward may be views
            self._allocate()
        self.flat.zero_()

    def copy_out(self, reduced: Tensor | None, untouched: Collection[int]) -> None:
        flat = self.flat
        if reduced is not None and (
            reduced.dtype is not flat.dtype or reduced.data_ptr() != flat.data_ptr()
        ):
            of_result, own = (t.untyped_storage().data_ptr() for t in (reduced, flat))
            # in the same memory, a direct copy would overwrite values before they are read
            flat.copy_(reduced.clone() if of_result == own else reduced)
        without = set()  # positions of members that keep their gradient, or get a new one
        for i in self._unused_places():
            parameter, view = self.parameters[i], self._views[i]
            if self.members[i] in untouched:
                if i in self._saved and parameter.grad is not None:
                    parameter.grad.copy_(self._saved[i])
            elif parameter.grad is None:
                parameter.grad = view if self._as_views else view.clone()
            else:
                continue
            without.add(i)
        places, gradients = self._outside([i for i in range(len(self.members)) if i not in without])
        if self._with_graph:
            for i, old in zip(places, gradients, strict=True):
                self.parameters[i].grad = with_history(old, self._views[i])
            return
        shared = self._ownership.used_elsewhere([self.members[i] for i in places], gradients)
        targets, results = [], []
        for i, gradient, is_shared in zip(places, gradients, shared, strict=True):
            if is_shared:
                self.parameters[i].grad = self._views[i].clone()
            else:
                targets.append(gradient)
                results.append(self._views[i])
        if flat.is_complex() or any(map(Tensor.is_neg, targets)):
            for gradient, result in zip(targets, results, strict=True):
                gradient.copy_(result)  # _foreach_copy_ does not write to lazy conjugates
        elif targets:
            torch._foreach_copy_(targets, results)

    def _outside(self, places: list[int]) -> tuple[list[int], list[Tensor]]:
        """Return the positions, of these, whose gradient is not a view of the buffer, and these."""
        gradients = [dense_gradient(self.parameters[i]) for i in places]
        if not self._as_views:
            return places, gradients
        pairs = zip(places, gradients, strict=True)
        outside = [(i, g) for i, g in pairs if not self._is_view(i, g)]
        return [i for i, _ in outside], [g for _, g in outside]
