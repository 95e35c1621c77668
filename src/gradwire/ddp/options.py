"""Options of a reducer, given once and passed unchanged to everything that they concern."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ReducerOptions:
    """Options of a `Reducer`, as in `DistributedDataParallel`.

    Attributes:
        caps: Size limits in bytes of the first bucket, the second, …; the last one repeats.
        skip_unused: If True, nothing is sent for unused buckets.
        sparse: Names of the parameters whose gradients are sparse.
        delayed: Names of parameters that are sent together, after all others.
        manual_finalization: If True, `Reducer.finalize` ends a backward.
        module: Name of the wrapped module, for messages.
    """

    caps: Sequence[int] | None = None
    gradient_as_bucket_view: bool = False
    find_unused_parameters: bool = False
    static_graph: bool = False
    skip_unused: bool = False
    sparse: Collection[str] = ()
    delayed: Collection[str] = ()
    lazy: bool = False
    manual_finalization: bool = False
    module: str = "(a reducer)"

    @property
    def rebuilds(self) -> bool:
        """True if buckets are reassigned after the first backward, in rank 0's order."""
        return self.static_graph or not self.find_unused_parameters  # the same parameters each time
