"""Interface of a bucket, and buckets of one gradient: a large dense one, or a sparse one.

In a backward each gradient becomes ready or is marked as unused. When no more gradients are
expected, the bucket copies them into a flat tensor that is reduced, and copies the result out.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from gradwire.buckets import memory_strides, views
from gradwire.ddp.arguments import ReducerOptions, inner_tensors
from gradwire.ddp.buckets.ownership import Ownership
from gradwire.errors import NotSupportedError, ReductionError
from gradwire.hooks import SparseSum

WITH_STREAMS = ("cuda", "xpu")
"""Types of accelerators whose memory and work belong to streams."""


@dataclass(frozen=True)
class Member:
    """Parameter of a bucket."""

    # of the parameter in the reducer
    index: int
    name: str
    parameter: Parameter
    # Meta tensor with the strides that the parameter had when it was wrapped, the same on all
    # ranks. The bucket stores the gradient with these: the parameter's own may change on one rank
    # alone.
    like: Tensor
    # Number of times that the gradient arrives in a backward: more than once in several reentrant
    # checkpoints, 0 if this rank never uses the parameter.
    count: int = 1


@dataclass(frozen=True)
class BucketContext:
    """Group, ownership and options, which all buckets of a reducer share."""

    # on shm, buffers lie in memory that its ranks share
    group: ProcessGroup
    ownership: Ownership
    options: ReducerOptions


class Bucket(ABC):
    """Parameters whose gradients are reduced together."""

    # flat tensor that is reduced, valid from `copy_in` to `copy_out`; `extra` is a view of the
    # `extra_numel` elements after the gradients
    flat: Tensor
    extra: Tensor
    extra_numel = 0

    def __init__(
        self,
        members: Sequence[Member],
        scale: float,
        context: BucketContext,
        early: Collection[int],
    ) -> None:
        self.members = tuple(m.index for m in members)
        self.names = [m.name for m in members]
        self.parameters = [m.parameter for m in members]
        self.like = [m.like for m in members]
        self._scale, self._ownership = scale, context.ownership
        # members whose gradient is ready in this backward, in order of arrival
        self.ready: list[int] = []
        self._counts = {m.index: m.count for m in members}
        self._never = {m.index for m in members if m.count == 0}
        self._count = sum(m.count for m in members)
        self._early = early
        self.reset()

    def reset(self) -> None:
        """Prepare for the next backward."""
        self.ready.clear()
        # members that get no gradient in this backward
        self.unused = set(self._never)
        # number of gradient arrivals after which the bucket is ready
        self.expected: float = self._count
        # members for which `copy_in_early` is called when their gradient is ready
        self.early = self._early
        # factor by which gradients are multiplied before the reduction
        self.scale = self._scale
        self._deferred = self._with_graph = False

    def defer(self, *, with_graph: bool = False) -> None:
        """Disable early copies in this backward; with a graph, keep the gradients' history."""
        self.early = ()
        self._deferred, self._with_graph = True, with_graph

    def mark_unused(self, members: Iterable[int]) -> None:
        """Mark members that get no gradient in this backward."""
        for member in members:
            if member not in self.unused:
                self.unused.add(member)
                self.expected -= self._counts[member]

    def missing(self) -> list[int]:
        """Return members whose gradient is neither ready nor marked as unused."""
        known = self.unused.union(self.ready)
        return [m for m in self.members if m not in known]

    def unexpected(self) -> list[str]:
        """Return the names of parameters whose gradient arrived more often than expected."""
        if len({*self.ready}) == len(self.ready) and self.unused.isdisjoint(self.ready):
            return []  # the usual case: counting takes ten times as long
        came = Counter(self.ready)
        limit = {m: 0 if m in self.unused else n for m, n in self._counts.items()}
        return [n for n, m in zip(self.names, self.members, strict=True) if came[m] > limit[m]]

    @property
    def all_ready(self) -> bool:
        """True if all gradients of this backward have arrived."""
        return len(self.ready) >= self.expected

    @property
    def all_unused(self) -> bool:
        """True if no member gets a gradient in this backward."""
        return len(self.unused) == len(self.members)

    @property
    def what(self) -> str:
        """Description of the bucket for messages."""
        more = f", … ({len(self.names)} parameters)" if self.names[3:] else ""
        return f"bucket of {', '.join(self.names[:3])}{more}"

    def move_out(self) -> None:
        """After an exception in backward, move gradients out of memory that is being reduced."""
        if self.flat.layout != torch.strided:
            return
        memory = self.flat.untyped_storage().data_ptr()
        for parameter in self.parameters:
            gradient = parameter.grad
            if gradient is None or gradient.layout != torch.strided:
                continue
            if gradient.untyped_storage().data_ptr() == memory:
                parameter.grad = gradient.clone()

    def copy_in_early(self, member: int, incoming: Sequence[Tensor]) -> None:
        """Copy in one ready gradient; `incoming` holds the gradient that autograd passed."""
        raise AssertionError("this bucket copies nothing in early")

    @abstractmethod
    def copy_in(self) -> None:
        """Fill `flat` with all gradients, scaled; zeros for unused ones that are None."""

    @abstractmethod
    def zero(self) -> None:
        """Fill `flat` with zeros, without changing any gradient."""

    @abstractmethod
    def copy_out(self, reduced: Tensor | None, untouched: Collection[int]) -> None:
        """Write `reduced`, or `flat` if it is None, to the gradients of members not `untouched`."""
        # `reduced` has the layout of `flat` and any dtype. `untouched` are members unused on this
        # rank, whose gradient stays as it was.

    def record_use(self) -> None:
        """Record the use of the buffer on the current stream, before the buffer is released."""
        record_use(getattr(self, "flat", None))

    def record_use_of_gradients(self) -> None:
        """Record the use of the gradients on the current stream, before they are copied in."""
        # Copying in may replace `.grad` by a view of the buffer, which frees the gradient. Its
        # memory may belong to another stream than its node's: autograd passes on tensors that
        # earlier nodes allocated.
        for parameter in self.parameters:
            record_use(parameter.grad)


def record_use(tensor: Tensor | None) -> None:
    """Tell the allocator that the current stream uses a tensor of an accelerator."""
    # Else its memory may be used again, on the stream that it was allocated on, before this one
    # has read it.
    if tensor is None or tensor.device.type not in WITH_STREAMS:
        return
    for inner in inner_tensors(tensor):
        if inner.layout is torch.strided and inner.device.type in WITH_STREAMS:
            inner.record_stream(torch.accelerator.current_stream(inner.device))


def dense_gradient(parameter: Parameter) -> Tensor:
    """Return the parameter's gradient; raise if it is None, sparse or of another dtype."""
    gradient = parameter.grad
    dense = gradient is not None and gradient.layout == torch.strided
    if gradient is not None and dense and gradient.dtype is parameter.dtype:
        return gradient
    what = f"the gradient of a parameter of shape {tuple(parameter.shape)}"
    if gradient is None:
        raise ReductionError(
            f"{what} was set to None before it was communicated: free gradients after backward; "
            "for an optimizer in backward use torch.distributed.optim._apply_optimizer_in_backward"
        )
    if not dense:
        raise NotSupportedError(
            f"{what} has layout {gradient.layout}, which is supported only for embeddings made "
            "with sparse=True: use dense gradients"
        )
    raise NotSupportedError(
        f"{what} has dtype {gradient.dtype} and the parameter {parameter.dtype}: gradients are "
        "reduced in their parameter's dtype. Leave grad_dtype as it is"
    )


def with_history(gradient: Tensor, reduced: Tensor) -> Tensor:
    """Return the reduced value with the history of the local gradient."""
    with torch.enable_grad():
        return gradient + (reduced - gradient).detach()


class InPlaceBucket(Bucket):
    """Bucket of one large dense gradient, reduced in place."""

    def __init__(self, member: Member, scale: float, context: BucketContext) -> None:
        early = (member.index,) if member.count == 1 else ()
        super().__init__([member], scale, context, early)
        self._strides = memory_strides(member.like)

    def reset(self) -> None:
        super().reset()
        self._taken = False
        self._copy: Tensor | None = None

    def copy_in_early(self, member: int, incoming: Sequence[Tensor]) -> None:
        parameter = self.parameters[0]
        gradient = dense_gradient(parameter)
        straight = gradient.stride() == self._strides
        if straight and self._ownership.may_write(gradient, incoming):
            self.flat = gradient.as_strided((gradient.numel(),), (1,))
            self._scale_flat()
        else:
            # its own memory must not be written to, or has other strides
            self._copy_in_whole(gradient)
        self._taken = True

    def copy_in(self) -> None:
        if self._taken:
            return  # copied in early
        parameter = self.parameters[0]
        gradient = parameter.grad if self.unused else dense_gradient(parameter)
        if gradient is None:
            self.zero()
        else:
            self._copy_in_whole(gradient)

    def _copy_in_whole(self, gradient: Tensor) -> None:
        self._allocate().copy_(gradient.detach())
        self._scale_flat()

    def _allocate(self) -> Tensor:
        parameter = self.parameters[0]
        self.flat = torch.empty(parameter.numel(), dtype=parameter.dtype, device=parameter.device)
        self._copy = views(self.flat, self.like)[0]
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
                parameter.grad = with_history(parameter.grad, self._copy)
            elif self._ownership.used_elsewhere([self.members[0]], [dense_gradient(parameter)])[0]:
                parameter.grad = self._copy
            else:
                dense_gradient(parameter).copy_(self._copy)
        self._copy = None
        del self.flat


class SparseBucket(Bucket):
    """Bucket of one sparse gradient; `flat` is the COO tensor itself."""

    def __init__(self, member: Member, scale: float, context: BucketContext) -> None:
        super().__init__([member], scale, context, early=())
        # its messages have the same sizes on all ranks: after an error, all make new buckets
        self.total = SparseSum(context.group)

    def copy_in(self) -> None:
        gradient = self.parameters[0].grad
        if gradient is None:
            if not self.unused:
                raise ReductionError(
                    f"the gradient of {self.names[0]} was set to None before it was "
                    "communicated: free gradients after backward"
                )
            # this rank takes part with no entries
            self.zero()
            return
        gradient = gradient.detach()
        if gradient.layout == torch.strided:
            # the embedding's weight is also used elsewhere: this rank takes part with all entries
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
