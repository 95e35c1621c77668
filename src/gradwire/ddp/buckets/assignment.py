"""Assignment of a reducer's parameters to buckets, in the order in which these are launched.

The order is derived from one in which parameters become ready. `gradwire.buckets.plan_buckets`
chooses the sizes of buckets.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from gradwire.buckets import plan_buckets
from gradwire.ddp.arguments import ReducerOptions
from gradwire.ddp.buckets.bucket import (
    Bucket,
    BucketContext,
    InPlaceBucket,
    PackedBucket,
    SparseBucket,
    record_use,
)
from gradwire.ddp.buckets.ownership import Ownership
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
_EXACT = (torch.float32, torch.float64)


class BucketSet:
    """Buckets of a reducer, in launch order."""

    def __init__(
        self,
        named: Sequence[tuple[str, Parameter]],
        group: ProcessGroup,
        options: ReducerOptions,
        *,
        extra_numel: int = 0,
    ) -> None:
        self.names, self.parameters = [n for n, _ in named], [p for _, p in named]
        # extra elements follow the gradients of the first float32 or float64 bucket, unless a hook
        # communicates
        self.group, self.options, self._extra_numel = group, options, extra_numel
        self._sparse = {i for i, name in enumerate(self.names) if name in options.sparse}
        self._delayed = {i for i, name in enumerate(self.names) if name in options.delayed}
        # parameter indices of each bucket; if set, the order of readiness is ignored
        self.layout: Sequence[Sequence[int]] | None = None
        # for a static graph, the number of times that each parameter's gradient arrives in a
        # backward; 1 by default
        self.counts: Mapping[int, int] = {}
        self.ownership = Ownership()
        # The current strides are the same on all ranks: their models have just been compared.
        self._like = [
            torch.empty_strided(p.shape, p.stride(), dtype=p.dtype, device="meta")
            for p in self.parameters
        ]
        # A tensor of one dimension has one layout. Each of the others takes 0.1 µs per step.
        self._turnable = [p for p in self.parameters if p.dim() > 1]
        self._strides = [p.stride() for p in self._turnable]
        self._buckets: list[Bucket] = []
        # bucket of each parameter
        self.of: list[Bucket] = []
        # carries the sums of weights
        self.weights_bucket: Bucket | None = None
        self._with_hook = False
        self._interrupted: Callable[[], None] | None = None

    def __len__(self) -> int:
        return len(self._buckets)

    def __iter__(self) -> Iterator[Bucket]:
        return iter(self._buckets)

    def __getitem__(self, index: int) -> Bucket:
        return self._buckets[index]

    # -- assignment --------------------------------------------------------------------------

    def first_order(self) -> list[int]:
        """Return the reverse order of registration, as PyTorch does before the first backward."""
        return list(range(len(self.parameters)))[::-1]

    def make(self, order: Sequence[int], *, with_hook: bool) -> None:
        """Replace the buckets by buckets for parameters that become ready in this order."""
        self._interrupted = partial(self.make, order, with_hook=with_hook)
        self._with_hook = with_hook
        for bucket in self._buckets:
            record_use(getattr(bucket, "flat", None))  # before it is released
        # Release the old buckets first, so that the new ones can use their memory.
        self.of, self._buckets, self.weights_bucket = [], [], None
        self._buckets = self._new_buckets(order)
        self.weights_bucket = next((b for b in self._buckets if b.extra_numel), None)
        of = {i: bucket for bucket in self._buckets for i in bucket.members}
        # The gradient of a parameter that is not in `order` is unexpected: it gets a bucket that
        # expects no gradient and is never launched. Sparse buckets allocate no memory.
        everyone = range(len(self.parameters))
        context = self._context({i: 0 for i in everyone if i not in of})
        self.of = [of.get(i) or SparseBucket(i, 1.0, context) for i in everyone]
        self._interrupted = None

    def finish_making(self) -> None:
        """Finish a call of `make` that an exception such as KeyboardInterrupt ended."""
        if self._interrupted is not None:
            self._interrupted()

    def _new_buckets(self, order: Sequence[int]) -> list[Bucket]:
        """Return buckets in launch order, for the parameters in `order`."""
        as_views = self.options.gradient_as_bucket_view
        old_views = {i: self.parameters[i].grad for i in order} if as_views else {}
        buckets: list[Bucket] = []
        context = self._context(self.counts)
        extra_numel = 0 if self._with_hook else self._extra_numel
        scale = 1.0 if self._with_hook else 1.0 / self.group.size()
        carrier = self._carrier(order)
        for indices in self._partition(order):
            packed = []
            for i in indices:
                if i in self._sparse:
                    buckets.append(SparseBucket(i, scale, context))
                elif i != carrier and self._travels_alone(i):
                    # Launched before the packed bucket, which may become ready later.
                    buckets.append(InPlaceBucket(i, scale, context))
                else:
                    packed.append(i)
            if packed:
                room = extra_numel if self.parameters[packed[0]].dtype in _EXACT else 0
                buckets.append(PackedBucket(packed, scale, context, extra_numel=room))
                extra_numel -= room
        for i, gradient in old_views.items():  # views of the previous buckets
            if gradient is not None:
                self.parameters[i].grad = gradient.clone()
        return buckets

    def _context(self, counts: Mapping[int, int]) -> BucketContext:
        given = self.names, self.parameters, self._like, counts
        return BucketContext(*given, self.group, self.ownership, self.options)

    def _partition(self, order: Sequence[int]) -> list[Sequence[int]]:
        """Return the parameters of each bucket, in launch order."""
        if self.layout is not None:
            wanted = set(order)
            given = [[i for i in members if i in wanted] for members in self.layout]
            return [members for members in given if members]
        soon = [i for i in order if i not in self._delayed]
        late = [i for i in order if i in self._delayed]
        caps = self.options.caps
        if caps is None:
            # On the CPU, no small first bucket: with two ranks on two cores and 200 small layers,
            # exposed communication was 0.6 of PyTorch's without it and 0.8 with it. With PyTorch's
            # fp16_compress_hook, a step took 1.03 of PyTorch's without it and 1.10 with it.
            caps = [BUCKET_BYTES] if self._on_cpu else [FIRST_BUCKET_BYTES, BUCKET_BYTES]
        return [*self._plan(soon, caps), *self._plan(late, [_NO_LIMIT])]

    def _plan(self, order: Sequence[int], caps: Sequence[int]) -> Sequence[Sequence[int]]:
        params = [self.parameters[i] for i in order]
        alone = [i in self._sparse for i in range(len(self.parameters))] if self._sparse else ()
        sizes, dtypes = [p.nbytes for p in params], [p.dtype for p in params]
        devices, indices = [p.device for p in params], list(order)
        return plan_buckets(sizes, dtypes, devices, caps, alone=alone, indices=indices).buckets

    @property
    def _on_cpu(self) -> bool:
        return all(p.device.type == "cpu" for p in self.parameters)

    def _carrier(self, order: Sequence[int]) -> int | None:
        """Return the parameter to pack so that some bucket has room for weights, or None."""
        fit = self._fit_for_weights(order)
        if not self._extra_numel or not all(map(self._travels_alone, fit)):
            # no weights are used, or another parameter is packed anyway
            return None
        return min(fit, key=lambda i: self.parameters[i].nbytes, default=None)

    def _fit_for_weights(self, order: Iterable[int]) -> list[int]:
        parameters = self.parameters
        return [i for i in order if i not in self._sparse and parameters[i].dtype in _EXACT]

    @property
    def can_carry_weights(self) -> bool:
        """True if a bucket has room for weights when there is no hook."""
        return self._extra_numel > 0 and bool(self._fit_for_weights(range(len(self.parameters))))

    def _travels_alone(self, index: int) -> bool:
        # Hooks get the same buckets as in PyTorch. On shm, the ranks reduce a packed gradient where
        # it lies, without a copy.
        if self._with_hook or self.layout is not None or shares_memory(self.group):
            return False
        parameter = self.parameters[index]
        least = IN_PLACE_BYTES * max(1, self.group.size() // 4)
        if self.options.caps is not None:  # one that fills a bucket by itself
            least = min(least, max(FIRST_BUCKET_BYTES, self.options.caps[-1]))
        fit = index not in self._delayed and parameter.device.type == "cpu"
        return fit and parameter.nbytes >= least

    # -- one backward ------------------------------------------------------------------------

    def reset(self) -> None:
        """Prepare for the next backward."""
        for bucket in self._buckets:
            bucket.reset()

    def mark_unused(self, indices: Iterable[int]) -> None:
        """Mark parameters that get no gradient in this backward."""
        found: dict[int, list[int]] = defaultdict(list)
        for i in indices:
            found[id(self.of[i])].append(i)
        for bucket in self._buckets:
            bucket.mark_unused(found.get(id(bucket), ()))

    def missing(self) -> list[int]:
        """Return parameters whose gradient is neither ready nor marked as unused."""
        return [i for bucket in self._buckets if not bucket.all_ready for i in bucket.missing()]

    def unused(self) -> set[int]:
        """Return parameters that get no gradient in this backward."""
        return {i for bucket in self._buckets for i in bucket.unused}

    def ready(self) -> list[int]:
        """Return parameters whose gradient is ready, once for each arrival."""
        return [i for bucket in self._buckets for i in bucket.ready]

    def lay_as_parameters(self) -> None:
        """Give gradients the strides of parameters whose memory format changed after wrapping."""
        # Buckets keep the strides with which the ranks' models were compared. Fused optimizers read
        # parameters and gradients in memory order and ignore their strides.
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
