"""Bucket of one sparse gradient, such as of an embedding with sparse=True."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from gradwire.ddp.buckets.bucket import Bucket, BucketOptions, Member
from gradwire.errors import ReductionError


class SparseBucket(Bucket):
    """Bucket of one sparse gradient; `flat` is the COO tensor itself.

    A rank without the gradient takes part with no entries. A rank where it is dense, because the
    embedding's weight is also used elsewhere, takes part with all entries.
    """

    def __init__(self, member: Member, scale: float, options: BucketOptions) -> None:
        super().__init__([member], scale=scale, early=(), options=options)

    def copy_in(self) -> None:
        member, gradient = self.members[0], self.parameters[0].grad
        if self.unused:
            gradient = self._ownership.unused_gradient(member, gradient)
        elif gradient is not None:
            gradient = self._ownership.ready_gradient(member, gradient)
        if gradient is None:
            if not self.unused:
                raise ReductionError(
                    f"the gradient of {self.names[0]} was set to None before it was "
                    "communicated: free gradients after backward"
                )
            self.zero()
            return
        gradient = gradient.detach()
        if gradient.layout == torch.strided:
            gradient = gradient.to_sparse(1)
        self.flat = gradient.coalesce() * self.scale

    def zero(self) -> None:
        parameter = self.parameters[0]
        self.flat = torch.sparse_coo_tensor(
            torch.empty((1, 0), dtype=torch.int64, device=parameter.device),
            torch.empty((0, *parameter.shape[1:]), dtype=parameter.dtype, device=parameter.device),
            parameter.shape,
            check_invariants=False,
        ).coalesce()

    def copy_out(self, reduced: Tensor | None, untouched: Collection[int]) -> None:
        result = self.flat if reduced is None else reduced
        parameter = self.parameters[0]
        if self.members[0] not in untouched:
            if parameter.grad is not None and parameter.grad.layout == torch.strided:
                parameter.grad.copy_(result.to_dense())
            else:
                parameter.grad = result
        del self.flat
