"""Buckets of one gradient: a large dense one, reduced in its own memory, or a sparse one."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from gradwire.buckets import memory_strides, views
from gradwire.ddp.buckets.bucket import Bucket, BucketContext, Member, dense_gradient, move_out
from gradwire.ddp.buckets.ownership import is_conj_or_neg
from gradwire.errors import ReductionError
from gradwire.hooks import SparseSum


class InPlaceBucket(Bucket):
    """Bucket of one large dense gradient, reduced in place.

    The gradient is first moved to new memory if its own memory must not be written to or its
    strides differ from the parameter's.
    """

    def __init__(self, member: Member, scale: float, context: BucketContext) -> None:
        early = (member.index,) if member.count == 1 else ()
        super().__init__([member], scale=scale, early=early, context=context)
        self._strides = memory_strides(member.like)

    def reset(self) -> None:
        super().reset()
        self._taken = False
        self._copy: Tensor | None = None

    def move_out(self) -> None:
        move_out(self.parameters[0], self.flat.data_ptr())

    def copy_in_early(self, member: int, incoming: Sequence[Tensor]) -> None:
        parameter = self.parameters[0]
        gradient = dense_gradient(parameter)
        straight = gradient.stride() == self._strides
        if straight and self._ownership.may_write(gradient, incoming):
            self.flat = gradient.as_strided((gradient.numel(),), (1,))
            self._scale_flat()
        else:
            self._copy_in_whole(gradient)
            if not is_conj_or_neg(gradient) and self._ownership.may_move(
                member, parameter, names=1
            ):
                gradient.set_(self._copy)  # type: ignore[call-overload]  # torch's stub lacks it
                self._copy = None
        self._taken = True

    def copy_in(self) -> None:
        if self._taken:
            return  # copied in early
        parameter = self.parameters[0]
        if not self.unused:
            self._copy_in_whole(dense_gradient(parameter))
        elif parameter.grad is not None:  # accumulated earlier
            self._copy_in_whole(parameter.grad)
        else:
            self.zero()

    def _copy_in_whole(self, gradient: Tensor) -> None:
        self._allocate().copy_(gradient.detach())
        self._scale_flat()

    def _allocate(self) -> Tensor:
        parameter = self.parameters[0]
        self.flat = torch.empty(parameter.numel(), dtype=parameter.dtype, device=parameter.device)
        self._copy = views(self.flat, self.like, keep_strides=True)[0]
        return self._copy

    def _scale_flat(self) -> None:
        if self.scale != 1.0:
            self.flat.mul_(self.scale)

    def zero(self) -> None:
        self._allocate().zero_()

    def copy_out(self, reduced: Tensor | None, untouched: Collection[int]) -> None:
        assert reduced is None, "communication hooks use packed buckets"
        parameter = self.parameters[0]
        if self._copy is not None and self.members[0] not in untouched:
            if parameter.grad is None:
                parameter.grad = self._copy
            elif self._with_graph:
                parameter.grad = parameter.grad + (self._copy - parameter.grad).detach()
            else:
                self._put(parameter, self._copy)
        self._copy = None
        del self.flat

    def _put(self, parameter: Parameter, reduced: Tensor) -> None:
        member, ownership = self.members[0], self._ownership
        gradient = dense_gradient(parameter)
        if (
            not is_conj_or_neg(gradient)
            and ownership.used_elsewhere([member], [gradient])[0]
            and ownership.may_move(member, parameter, names=1)
        ):
            gradient.set_(reduced)  # type: ignore[call-overload]
        else:
            gradient.copy_(reduced)


class SparseBucket(Bucket):
    """Bucket of one sparse gradient; `flat` is the COO tensor itself.

    A rank without the gradient takes part with no entries. A rank where it is dense, because the
    embedding's weight is also used elsewhere, takes part with all entries.

    Attributes:
        total: Sums over ranks. Their messages have the same sizes on all ranks: after an error, all
            ranks make new buckets.
    """

    def __init__(self, member: Member, scale: float, context: BucketContext) -> None:
        super().__init__([member], scale=scale, early=(), context=context)
        self.total = SparseSum(context.group)

    def copy_in(self) -> None:
        gradient = self.parameters[0].grad
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
