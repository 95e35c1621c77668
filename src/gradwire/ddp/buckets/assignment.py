"""Assignment of parameters to buckets, and the order in which buckets are launched.

`BucketAssigner.make` returns the reducer's buckets in launch order, given the order in which
parameters become ready. `gradwire.buckets.plan_buckets` chooses the bucket sizes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from gradwire.buckets import plan_buckets
from gradwire.ddp.buckets.bucket import Bucket, BucketContext, Member
from gradwire.ddp.buckets.ownership import Ownership
from gradwire.ddp.buckets.packed import PackedBucket
from gradwire.ddp.buckets.unpacked import InPlaceBucket, SparseBucket
from gradwire.ddp.options import ReducerOptions
from gradwire.shm import shares_memory

FIRST_BUCKET_BYTES = 1 << 20
BUCKET_BYTES = 25 << 20
IN_PLACE_BYTES = 4 << 20
"""Minimum size of a CPU gradient that up to seven ranks reduce in place, in its own bucket. One
more message then costs less than a copy into a bucket and back. With two ranks on two cores, a
message costs 0.5 ms while both compute; a threshold of 1 MiB was slower. A message goes round all
ranks: with more of them, the size grows with their number. On accelerators copies are cheap and
messages are not."""

_NO_LIMIT = 1 << 62


class BucketAssigner:
    """Factory of a reducer's buckets.

    Args:
        named: Names and parameters of the reducer.
        group: Process group.
        options: Options of the reducer.
        extra_numel: Number of extra elements after the gradients of the first float32 or float64
            bucket. Unused with a hook.

    Attributes:
        layout: Parameter indices of each bucket, if set. The order of readiness is then ignored.
        counts: For a static graph, the number of times that each parameter's gradient arrives in
            a backward. The default is 1.
        ownership: Ownership of the gradients' memory.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, Parameter]],
        group: ProcessGroup,
        options: ReducerOptions,
        *,
        extra_numel: int = 0,
    ) -> None:
        self.names, self.parameters = [n for n, _ in named], [p for _, p in named]
        self.group, self.options, self._extra_numel = group, options, extra_numel
        self._sparse = {i for i, name in enumerate(self.names) if name in options.sparse}
        self._delayed = {i for i, name in enumerate(self.names) if name in options.delayed}
        self.layout: Sequence[Sequence[int]] | None = None
        self.counts: Mapping[int, int] = {}
        self.ownership = Ownership()
        # The current strides are the same on all ranks: their models have just been compared.
        self._like = [_without_values(p) for p in self.parameters]
        # A tensor of one dimension has one layout. Each of the others takes 0.1 µs per step.
        self._turnable = [p for p in self.parameters if p.dim() > 1]
        self._strides = [p.stride() for p in self._turnable]

    def first_order(self) -> list[int]:
        """Return the reverse order of registration, as PyTorch does before the first backward."""
        return list(range(len(self.parameters)))[::-1]

    def make(self, order: Sequence[int], *, with_hook: bool) -> list[Bucket]:
        """Return buckets in launch order for parameters that become ready in this order.

        Parameters that are not in `order` have no bucket.
        """
        as_views = self.options.gradient_as_bucket_view
        old_views = {i: self.parameters[i].grad for i in order} if as_views else {}
        buckets: list[Bucket] = []
        context = BucketContext(self.group, self.ownership, self.options, lend=self._on_cpu)
        extra_numel = 0 if with_hook else self._extra_numel
        scale = 1.0 if with_hook else 1.0 / self.group.size()
        carrier = self._carrier(order, with_hook=with_hook)
        for members in self._partition(order, with_hook=with_hook):
            packed = []
            for i in members:
                if i in self._sparse:
                    buckets.append(SparseBucket(self.member(i), scale, context))
                elif i != carrier and self._travels_alone(i, with_hook=with_hook):
                    # Launched before the packed bucket, which may become ready later.
                    buckets.append(InPlaceBucket(self.member(i), scale, context))
                else:
                    packed.append(self.member(i))
            if packed:
                exact = packed[0].parameter.dtype in (torch.float32, torch.float64)
                room = extra_numel if exact else 0
                buckets.append(PackedBucket(packed, scale, context, extra_numel=room))
                extra_numel -= room
        for i, gradient in old_views.items():  # views of the previous buckets
            if gradient is not None:
                self.parameters[i].grad = gradient.clone()
        return buckets

    def _partition(self, order: Sequence[int], *, with_hook: bool) -> list[Sequence[int]]:
        """Return the parameters of each bucket, in launch order."""
        if self.layout is not None:
            wanted = set(order)
            given = [[i for i in members if i in wanted] for members in self.layout]
            return [members for members in given if members]
        caps = self._caps(with_hook=with_hook)
        soon = [i for i in order if i not in self._delayed]
        late = [i for i in order if i in self._delayed]
        return [*self._plan(soon, caps), *self._plan(late, [_NO_LIMIT])]

    def _plan(self, order: Sequence[int], caps: Sequence[int]) -> Sequence[Sequence[int]]:
        params = [self.parameters[i] for i in order]
        alone = [i in self._sparse for i in range(len(self.parameters))] if self._sparse else ()
        return plan_buckets(
            [p.nbytes for p in params],
            [p.dtype for p in params],
            [p.device for p in params],
            caps,
            alone=alone,
            indices=list(order),
        ).buckets

    def member(self, index: int, *, count: int | None = None) -> Member:
        """Return the bucket member of a parameter; `count` overrides the known count."""
        times = self.counts.get(index, 1) if count is None else count
        return Member(index, self.names[index], self.parameters[index], self._like[index], times)

    def lay_as_parameters(self) -> None:
        """Give gradients the strides of parameters whose memory format changed after wrapping.

        Buckets keep the strides with which the ranks' models were compared. Fused optimizers read
        parameters and gradients in memory order and ignore their strides.
        """
        strides = [p.stride() for p in self._turnable]
        if strides == self._strides:
            return
        for parameter, now, before in zip(self._turnable, strides, self._strides, strict=True):
            gradient = parameter.grad
            if now == before or gradient is None or gradient.layout != torch.strided:
                continue
            turned = torch.empty_like(parameter, requires_grad=False)
            if gradient.grad_fn is None and gradient.stride() != turned.stride():
                parameter.grad = turned.copy_(gradient)

    @property
    def _on_cpu(self) -> bool:
        return all(p.device.type == "cpu" for p in self.parameters)

    def _caps(self, *, with_hook: bool) -> Sequence[int]:
        if self.options.caps is not None:
            return self.options.caps
        if self._on_cpu and not with_hook:
            # No small first bucket: with two ranks on two cores and 200 small layers, exposed
            # communication was 0.6 of PyTorch's without it and 0.8 with it.
            return [BUCKET_BYTES]
        return [FIRST_BUCKET_BYTES, BUCKET_BYTES]

    def _carrier(self, order: Sequence[int], *, with_hook: bool) -> int | None:
        """Return the parameter to pack so that some bucket has room for weights.

        Return None if no weights are used or another parameter is packed anyway.
        """
        exact = (torch.float32, torch.float64)
        fit = [i for i in order if i not in self._sparse and self.parameters[i].dtype in exact]
        if not self._extra_numel or not all(
            self._travels_alone(i, with_hook=with_hook) for i in fit
        ):
            return None
        return min(fit, key=lambda i: self.parameters[i].nbytes, default=None)

    def _travels_alone(self, index: int, *, with_hook: bool) -> bool:
        # Hooks get the same buckets as in PyTorch. On shm, the ranks reduce a packed gradient where
        # it lies, without a copy.
        if with_hook or self.layout is not None or shares_memory(self.group):
            return False
        parameter = self.parameters[index]
        least = IN_PLACE_BYTES * max(1, self.group.size() // 4)
        fit = index not in self._delayed and parameter.device.type == "cpu"
        return fit and parameter.nbytes >= least


def _without_values(parameter: Parameter) -> Tensor:
    """Return a meta tensor of the same shape, strides and dtype."""
    strides = parameter.stride()
    return torch.empty_strided(parameter.shape, strides, dtype=parameter.dtype, device="meta")
