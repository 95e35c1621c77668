"""The buckets of a reducer, in the order of launch, and which of them each parameter is in."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from gradwire.ddp.buckets.assignment import BucketAssigner
from gradwire.ddp.buckets.bucket import Bucket, BucketOptions
from gradwire.ddp.buckets.hook_state import Part, rekey
from gradwire.ddp.buckets.sparse import SparseBucket

__all__ = ["BucketSet"]


class BucketSet:
    """Buckets.

    Args:
        assigner: Makes them.

    Attributes:
        of: For each parameter, its bucket.
        weights_bucket: The bucket with which the sums of weights travel, if there is one.
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
        """The buckets that are launched after this one."""
        return self._buckets[index + 1 :]

    def make(self, order: Sequence[int], *, with_hook: bool, state: Any = None) -> None:
        """Replace them by buckets for parameters that become ready in this order.

        A hook's state goes along. What is not in the order is in no bucket: its arrival is
        unexpected.
        """
        self._make(order, self.layout, with_hook=with_hook, state=state)

    def finish_making(self) -> None:
        """Make the buckets that an exception, such as Ctrl-C, kept from being made."""
        if self._interrupted is not None:
            self._interrupted()

    def _make(
        self, order: Sequence[int], before: list[list[Part]], *, with_hook: bool, state: Any
    ) -> None:
        self._interrupted = partial(self._make, order, before, with_hook=with_hook, state=state)
        # nothing holds the old buckets from here on: their memory is free for the new ones
        self.of, self._buckets, self.weights_bucket = [], [], None
        self._buckets = self._assigner.make(order, with_hook=with_hook)
        self.weights_bucket = next((b for b in self._buckets if b.extra_numel), None)
        # for a parameter in no bucket, one that expects no gradient and is never launched: what
        # arrives there is unexpected. A sparse bucket allocates nothing
        options = BucketOptions(self._assigner.group, self._assigner.ownership)
        count = len(self._assigner.parameters)
        self.of = [
            SparseBucket(self._assigner.member(i, count=0), 1.0, options) for i in range(count)
        ]
        for bucket in self._buckets:
            for i in bucket.members:
                self.of[i] = bucket
        self._interrupted = None
        if before and state is not None:
            rekey(state, before, self.layout)

    @property
    def layout(self) -> list[list[Part]]:
        """The parameters in each, with their sizes."""
        return [
            [Part(n, p.numel()) for n, p in zip(b.names, b.parameters, strict=True)]
            for b in self._buckets
        ]

    def reset(self) -> None:
        """Ready for the next backward."""
        for bucket in self._buckets:
            bucket.reset()

    def defer(self, *, with_graph: bool = False, until_the_end: bool = False) -> None:
        """Copy nothing in early in this backward, or only when it has ended."""
        for bucket in self._buckets:
            bucket.defer(with_graph=with_graph)
            if until_the_end:
                # how often each gradient arrives is what this backward is to show
                bucket.expected = math.inf

    def lend(self) -> None:
        """A backward begins, as `Bucket.lend` has it."""
        for bucket in self._buckets:
            bucket.lend()

    def take_back(self) -> None:
        """A backward ends without all gradients, as `Bucket.take_back` has it."""
        for bucket in self._buckets:
            bucket.take_back()

    def mark_unused(self, indices: Iterable[int]) -> None:
        """These parameters get no gradient in this backward."""
        found: dict[int, list[int]] = defaultdict(list)
        for i in indices:
            found[id(self.of[i])].append(i)
        for bucket in self._buckets:
            bucket.mark_unused(found.get(id(bucket), ()))

    def complete(self) -> None:
        """Nothing more is expected."""
        self.mark_unused(self.missing())
        for bucket in self._buckets:
            bucket.expected = 0

    def missing(self) -> list[int]:
        """Parameters whose gradient is neither there nor known to be unused."""
        return [i for bucket in self._buckets if not bucket.all_ready for i in bucket.missing()]

    def unused(self) -> set[int]:
        """Parameters that get no gradient in this backward."""
        return {i for bucket in self._buckets for i in bucket.unused}

    def ready(self) -> list[int]:
        """Parameters whose gradient is there, as often as it came."""
        return [i for bucket in self._buckets for i in bucket.ready]

    @property
    def untouched(self) -> bool:
        """Whether no gradient has arrived yet."""
        return not any(bucket.ready for bucket in self._buckets)
