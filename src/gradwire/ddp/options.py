"""Options of a reducer, given once and passed unchanged to everything that they concern."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ReducerOptions:
    """Options of a `Reducer`.

    Attributes:
        caps: Size limits in bytes of the first bucket, the second, …; the last one repeats. None
            for 25 MiB, after a first bucket of 1 MiB that starts communication early. On the CPU,
            one more message costs more than an early start gains, so the small first bucket is
            used only if a hook is registered.
        gradient_as_bucket_view: If True, gradients are views of their bucket. This saves memory
            and a copy; `detach_()` on them is then an error.
        find_unused_parameters: If True, a backward may leave out parameters, on some ranks or on
            all.
        static_graph: If True, every backward uses the same parameters, equally often, as the first.
        skip_unused: If True, nothing is sent for unused buckets, which must be unused on every
            rank.
        sparse: Names of the parameters whose gradients are sparse.
        delayed: Names of parameters that are sent together, after all others.
        lazy: If True, a bucket's memory is allocated when its first gradient arrives, and released
            after the backward unless gradients are stored in it.
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

    def agreed(self) -> list[tuple[str, str]]:
        """Return the options that determine the messages, in the format of `verify_same`."""
        given = {
            "find_unused_parameters": self.find_unused_parameters,
            "static_graph": self.static_graph,
            "skip_all_reduce_unused_params": self.skip_unused,
            "delay_all_reduce_named_params": sorted(self.delayed),
        }
        return [(name, f"an argument, {value!r}") for name, value in given.items()]
