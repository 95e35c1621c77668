"""Buckets of a reducer in launch order, and the bucket of each parameter."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from gradwire.ddp.buckets.assignment import BucketAssigner
from gradwire.ddp.buckets.bucket import Bucket, BucketContext
from gradwire.ddp.buckets.unpacked import SparseBucket


class BucketSet:
    """Buckets of a reducer, in launch order.

    Args:
        assigner: Factory of the buckets.

    Attributes:
        of: Bucket of each parameter.
        weights_bucket: Bucket that carries the sums of weights, if there is one.
    """

    def __init__(self, assigner: BucketAssigner) -> None:
        self._assigner = assigner
        self._buckets: list[Bucket] = []
        self.of: list[Bucket] = []
        self.weights_bucket: Bucket | None = None
        self._interrupted: Callable[[], None] | None = None

    def __len__(self) -> int:
        return len(self._buckets)

    def __iter__(self) -> Iterator[Bucket]:
        return iter(self._buckets)

    def __getitem__(self, index: int) -> Bucket:
        return self._buckets[index]

    def after(self, index: int) -> Sequence[Bucket]:
        """Return the buckets that are launched after this one."""
        return self._buckets[index + 1 :]

    def finish_making(self) -> None:
        """Finish a call of `make` that an exception such as KeyboardInterrupt ended."""
        if self._interrupted is not None:
            self._interrupted()

    def make(self, order: Sequence[int], *, with_hook: bool) -> None:
        """Replace the buckets by buckets for parameters that become ready in this order.

        A parameter that is not in `order` is in no bucket, and its gradient is unexpected.
        """
        self._interrupted = partial(self.make, order, with_hook=with_hook)
        for bucket in self._buckets:
            bucket.record_use()
        # Release the old buckets first, so that the new ones can use their memory.
        self.of, self._buckets, self.weights_bucket = [], [], None
        self._buckets = self._assigner.make(order, with_hook=with_hook)
        self.weights_bucket = next((b for b in self._buckets if b.extra_numel), None)
        # A parameter in no bucket gets a bucket that expects no gradient and is never launched.
        # Sparse buckets allocate no memory.
        assigner = self._assigner
        context = BucketContext(assigner.group, assigner.ownership, assigner.options)
        count = len(self._assigner.parameters)
        self.of = [
            SparseBucket(self._assigner.member(i, count=0), 1.0, context) for i in range(count)
        ]
        for bucket in self._buckets:
            for i in bucket.members:
                self.of[i] = bucket
        self._interrupted = None

    def reset(self) -> None:
        """Prepare for the next backward."""
        for bucket in self._buckets:
            bucket.reset()

    def defer(self, *, with_graph: bool = False, until_the_end: bool = False) -> None:
        """Disable early copies in this backward, or delay all copies until it has ended."""
        for bucket in self._buckets:
            bucket.defer(with_graph=with_graph)
            if until_the_end:
                # This backward counts how often each gradient arrives.
                bucket.expected = math.inf

    def lend(self) -> None:
        """Call `Bucket.lend` on each bucket at the start of a backward."""
        for bucket in self._buckets:
            bucket.lend()

    def take_back(self) -> None:
        """Call `Bucket.take_back` on each bucket when a backward ends with gradients missing."""
        for bucket in self._buckets:
            bucket.take_back()

    def mark_unused(self, indices: Iterable[int]) -> None:
        """Mark parameters that get no gradient in this backward."""
        found: dict[int, list[int]] = defaultdict(list)
        for i in indices:
            found[id(self.of[i])].append(i)
        for bucket in self._buckets:
            bucket.mark_unused(found.get(id(bucket), ()))

    def complete(self) -> None:
        """Mark missing gradients as unused, and expect no more."""
        self.mark_unused(self.missing())
        for bucket in self._buckets:
            bucket.expected = 0

    def missing(self) -> list[int]:
        """Return parameters whose gradient is neither ready nor marked as unused."""
        return [i for bucket in self._buckets if not bucket.all_ready for i in bucket.missing()]

    def unused(self) -> set[int]:
        """Return parameters that get no gradient in this backward."""
        return {i for bucket in self._buckets for i in bucket.unused}

    def ready(self) -> list[int]:
        """Return parameters whose gradient is ready, once for each arrival."""
        return [i for bucket in self._buckets for i in bucket.ready]

    @property
    def untouched(self) -> bool:
        """True if no gradient has arrived yet."""
        return not any(bucket.ready for bucket in self._buckets)
