"""A bucket of one large gradient that travels in its own memory: nothing is copied."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from gradwire.buckets import memory_strides, views
from gradwire.ddp._bucket import Bucket, Member, dense_gradient
from gradwire.gradients import GradBucket

__all__ = ["InPlaceBucket"]


class InPlaceBucket(Bucket):
    """One large dense gradient, communicated where it lies if it lies as its parameter does."""

    def __init__(self, member: Member, scale: float) -> None:
        super().__init__([member], scale=scale, early=(member.index,))
        self._strides = memory_strides(member.parameter)

    def reset(self) -> None:
        super().reset()
        self._taken = False
        self._copy: Tensor | None = None

    def gather_early(self, member: int, incoming: Tensor) -> None:
        gradient = dense_gradient(self.parameters[0])
        if gradient.stride() == self._strides:
            self.flat = gradient.as_strided((gradient.numel(),), (1,))
            self._scale_flat()
        else:  # autograd gives a gradient its parameter's strides; this one was put there
            self._gather_copy(gradient)
        self._taken = True

    def gather(self) -> None:
        if self._taken:
            return  # the one gradient came early
        if not self.absent:
            self._gather_copy(dense_gradient(self.parameters[0]))
        elif self.parameters[0].grad is not None:
            self._gather_copy(self.parameters[0].grad)
        else:
            self.blank()

    def _gather_copy(self, gradient: Tensor) -> None:
        self._allocate().copy_(gradient.detach())
        self._scale_flat()

    def _allocate(self) -> Tensor:
        parameter = self.parameters[0]
        self.flat = torch.empty(parameter.numel(), dtype=parameter.dtype, device=parameter.device)
        self._copy = views(self.flat, self.parameters, keep_strides=True)[0]
        return self._copy

    def _scale_flat(self) -> None:
        if self.scale != 1.0:
            self.flat.mul_(self.scale)

    def blank(self) -> None:
        self._allocate().zero_()

    def scatter(self, reduced: Tensor | None, untouched: Collection[int]) -> None:
        assert reduced is None, "hooks get packed buckets"
        parameter = self.parameters[0]
        if self._copy is not None and self.members[0] not in untouched:
            if parameter.grad is None:
                parameter.grad = self._copy
            elif self._with_graph:
                parameter.grad = parameter.grad + (self._copy - parameter.grad).detach()
            else:
                parameter.grad.copy_(self._copy)
        self._copy = None
        del self.flat

    def as_grad_bucket(self, index: int, *, is_last: bool) -> GradBucket:
        raise AssertionError("hooks get packed buckets")
