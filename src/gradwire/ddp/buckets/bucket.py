"""Buckets: of dense gradients that share a buffer, of a large dense gradient, of a sparse one.

In a backward each gradient becomes ready or is marked as unused. When no more gradients are
expected, the bucket copies them into a flat tensor that is reduced, and copies the result out.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn, cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from gradwire.buckets import memory_strides, views
from gradwire.ddp.arguments import ReducerOptions, inner_tensors
from gradwire.ddp.buckets.ownership import Ownership
from gradwire.errors import NotSupportedError, ReductionError
from gradwire.hooks import SparseSum
from gradwire.shm import empty

WITH_STREAMS = ("cuda", "xpu")
"""Types of accelerators whose memory and work belong to streams."""
AT_ONCE_BYTES = 32 << 10
"""Minimum size of a large gradient. From this size, three Python calls cost less than more passes
over memory."""


@dataclass(frozen=True)
class BucketContext:
    """Parameters of a reducer, by index, and what its buckets share."""

    names: Sequence[str]
    parameters: Sequence[Parameter]
    # Meta tensors with the strides that the parameters had when they were wrapped, the same on all
    # ranks. Buckets store gradients with these: a parameter's own may change on one rank alone.
    like: Sequence[Tensor]
    # Number of times that each gradient arrives in a backward, by default 1: more in several
    # reentrant checkpoints, 0 if this rank never uses the parameter.
    counts: Mapping[int, int]
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
        members: Sequence[int],
        scale: float,
        context: BucketContext,
        early: Collection[int] = (),
    ) -> None:
        self.members = tuple(members)
        self.names = [context.names[i] for i in members]
        self.parameters = [context.parameters[i] for i in members]
        self.like = [context.like[i] for i in members]
        self._scale, self._ownership = scale, context.ownership
        # members whose gradient is ready in this backward, in order of arrival
        self.ready: list[int] = []
        self._counts = {i: context.counts.get(i, 1) for i in members}
        self._never = {i for i, count in self._counts.items() if count == 0}
        self._count = sum(self._counts.values())
        self._early = [i for i in early if self._counts[i] == 1]
        self.reset()

    def reset(self) -> None:
        """Prepare for the next backward."""
        self.ready.clear()
        # members that get no gradient in this backward
        self.unused = set(self._never)
        # number of gradient arrivals after which the bucket is ready
        self.expected: float = self._count
        # members for which `copy_in_early` is called when their gradient is ready
        self.early: Collection[int] = self._early
        # factor by which gradients are multiplied before the reduction
        self.scale = self._scale
        self._with_graph = False

    def defer(self, *, with_graph: bool = False) -> None:
        """Disable early copies in this backward; with a graph, keep the gradients' history."""
        self.early, self._with_graph = (), with_graph

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


def dense_gradients(parameters: Sequence[Parameter]) -> list[Tensor]:
    """Return the gradients; raise if one is None, sparse or of another dtype than its parameter."""
    gradients, strided = [p.grad for p in parameters], torch.strided
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if (
            gradient is None
            or gradient.layout is not strided
            or gradient.dtype is not parameter.dtype
        ):
            _raise_not_dense(parameter, gradient)
    return cast(list[Tensor], gradients)


def _raise_not_dense(parameter: Parameter, gradient: Tensor | None) -> NoReturn:
    what = f"the gradient of a parameter of shape {tuple(parameter.shape)}"
    if gradient is None:
        raise ReductionError(
            f"{what} was set to None before it was communicated: free gradients after backward; "
            "for an optimizer in backward use torch.distributed.optim._apply_optimizer_in_backward"
        )
    if gradient.layout != torch.strided:
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


class PackedBucket(Bucket):
    """Bucket of dense gradients of one dtype and device that share a buffer."""

    # On the CPU, a large gradient is copied in and scaled as soon as it is ready, while it is in
    # the processor's cache. The others are copied in by one call when the bucket is ready. After
    # the reduction, one call copies all of them out, into their own memory. With
    # `gradient_as_bucket_view`, gradients become views of the buffer instead.

    def __init__(
        self, members: Sequence[int], scale: float, context: BucketContext, *, extra_numel: int
    ) -> None:
        parameters = context.parameters
        on_cpu = parameters[members[0]].device.type == "cpu"
        # the order must be the same on all ranks: it depends on sizes, not on this rank's counts
        if scale != 1.0:
            # large ones first, so that one call scales the others
            members = sorted(members, key=lambda i: parameters[i].nbytes < AT_ONCE_BYTES)
        # Gradients of Tensor subclasses keep their class; their values may be in inner tensors.
        plain = all(type(parameters[i]) is Parameter for i in members)
        self._as_views = context.options.gradient_as_bucket_view and plain
        self._group, self._lazy = context.group, context.options.lazy
        self.extra_numel = extra_numel
        self._views: list[Tensor] = []  # empty without a buffer
        # Positions of large gradients, by parameter index, and of the others. On an H100, copying
        # 50 large gradients one by one took 3 ms of a step of 55.
        large = [on_cpu and parameters[i].nbytes >= AT_ONCE_BYTES for i in members]
        self._large = {m: i for i, m in enumerate(members) if large[i]}
        self._small = [i for i, is_large in enumerate(large) if not is_large]
        super().__init__(members, scale, context, early=list(self._large))
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
            record_use(self.flat)
            del self.flat, self.extra
            self._views = []

    def copy_in_early(self, member: int, incoming: Sequence[Tensor]) -> None:
        if not self._views:
            self._allocate()
        place = self._large[member]
        (gradient,), view = dense_gradients([self.parameters[place]]), self._views[place]
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
        for i, is_shared in zip(places, shared, strict=True):
            if is_shared:
                self.parameters[i].grad = self._views[i].clone()
        targets = [g for g, is_shared in zip(gradients, shared, strict=True) if not is_shared]
        results = [self._views[i] for i, s in zip(places, shared, strict=True) if not s]
        if flat.is_complex() or any(map(Tensor.is_neg, targets)):
            for gradient, result in zip(targets, results, strict=True):
                gradient.copy_(result)  # _foreach_copy_ does not write to lazy conjugates
        elif targets:
            torch._foreach_copy_(targets, results)

    def _outside(self, places: list[int]) -> tuple[list[int], list[Tensor]]:
        """Return the positions, of these, whose gradient is not a view of the buffer, and these."""
        gradients = dense_gradients([self.parameters[i] for i in places])
        if not self._as_views:
            return places, gradients
        pairs = zip(places, gradients, strict=True)
        outside = [(i, g) for i, g in pairs if not self._is_view(i, g)]
        return [i for i, _ in outside], [g for _, g in outside]


class InPlaceBucket(Bucket):
    """Bucket of one large dense gradient, reduced in place."""

    def __init__(self, member: int, scale: float, context: BucketContext) -> None:
        super().__init__([member], scale, context, early=[member])
        self._strides = memory_strides(self.like[0])

    def reset(self) -> None:
        super().reset()
        self._taken = False
        self._copy: Tensor | None = None

    def copy_in_early(self, member: int, incoming: Sequence[Tensor]) -> None:
        (gradient,) = dense_gradients(self.parameters)
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
        gradient = self.parameters[0].grad if self.unused else dense_gradients(self.parameters)[0]
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
            else:
                gradients = dense_gradients(self.parameters)
                if self._ownership.used_elsewhere(self.members, gradients)[0]:
                    parameter.grad = self._copy
                else:
                    gradients[0].copy_(self._copy)
        self._copy = None
        del self.flat


class SparseBucket(Bucket):
    """Bucket of one sparse gradient; `flat` is the COO tensor itself."""

    def __init__(self, member: int, scale: float, context: BucketContext) -> None:
        super().__init__([member], scale, context)
        # its messages have the same sizes on all ranks: after an error, all make new buckets
        self.total = SparseSum(context.group)

    def copy_in(self) -> None:
        gradient = self.parameters[0].grad
        if gradient is None:
            if not self.unused:
                _raise_not_dense(self.parameters[0], gradient)
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
