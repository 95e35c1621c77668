"""Schedule of the exchanged parameters, and the reduction of their buckets."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from gradwire._engine_errors import backend_failure, is_over, is_transport
from gradwire.ddp import LOST, FaultDomain, wait_future
from gradwire.errors import ArgumentError, DistributedError, HookError
from gradwire.hooks import GradBucket, StatefulHook, as_future, hook_name, parse_hook_result


class Reduction:
    """Reduction of one bucket by a hook, under way from the constructor on.

    Args:
        hook: Communication hook.
        bucket: Bucket to reduce.
        domain: Fault domain of the group, which reports a failure to the other ranks.

    Raises:
        HookError: The hook failed.
        BrokenGroupError: The group failed before.
    """

    def __init__(self, hook: StatefulHook[Any], bucket: GradBucket, domain: FaultDomain) -> None:
        self._bucket, self._hook, self._domain = bucket, hook, domain
        self._dtype = bucket.buffer().dtype
        if domain.broken is not None:
            domain.raise_deferred()
        with self._reporting():
            self._future = as_future(hook.run_hook(bucket), hook)

    def wait(self) -> list[Tensor]:
        """Wait for the result, and return the averaged gradients.

        Raises:
            PeerLostError, CollectiveTimeoutError: Another rank was lost, or did not take part in
                time.
            HookError: The hook failed in another way.
        """
        with self._reporting():
            poll = partial(self._domain.poll_lost, look=True)
            if late := wait_future(self._future, poll, self._domain.seconds):
                raise late
            reduced = parse_hook_result(self._future.wait(), self._bucket, self._hook)
        self._bucket.set_buffer(reduced.to(self._dtype))
        return self._bucket.gradients()

    @contextlib.contextmanager
    def _reporting(self) -> Iterator[None]:
        """Convert errors, and report a lost rank to the others."""
        since = time.monotonic()
        try:
            yield
        except DistributedError as error:
            if self._domain.broken is None and isinstance(error, LOST):
                self._domain.give_up(error, error.__cause__)
            raise
        except Exception as error:
            what = f"hook {hook_name(self._hook)}, bucket {self._bucket.index()}"
            if not is_transport(error):
                raise HookError(f"{what}: {type(error).__name__}: {error}") from error
            timed_out = is_over(since, self._domain.seconds)
            self._domain.give_up(backend_failure(error, what, timed_out=timed_out), error)


class Exchange:
    """Exchange of a fragment that is not applied yet.

    Args:
        fragment: Number of the fragment.
        due: Number of the step after which it is applied.
        sent: Reductions of the buckets, with the indices of their parameters.
        gradients: Averaged outer gradients by parameter, if they are known.
    """

    def __init__(
        self,
        fragment: int,
        due: int,
        sent: Sequence[tuple[list[int], Reduction]] = (),
        gradients: dict[int, Tensor] | None = None,
    ) -> None:
        self.fragment, self.due = fragment, due
        self._sent, self._gradients = sent, gradients

    def wait(self) -> dict[int, Tensor]:
        """Return the averaged outer gradient of each parameter.

        Raises:
            DistributedError: See `Reduction.wait`.
        """
        if self._gradients is None:
            found: dict[int, Tensor] = {}
            for indices, reduction in self._sent:
                found.update(zip(indices, reduction.wait(), strict=True))
            self._gradients, self._sent = found, ()
        return self._gradients


def assign_fragments(sizes: Sequence[int], count: int) -> list[list[int]]:
    """Divide a sequence into contiguous runs of about equal size.

    Args:
        sizes: Size of each entry, ≥ 0.
        count: Number of runs, from 1 to the number of entries.

    Returns:
        Indices in each run, at least one.

    Raises:
        ArgumentError: `count` is out of its range.

    Example:
        >>> assign_fragments([5, 1, 1, 1, 4], 2)
        [[0, 1], [2, 3, 4]]
    """
    if not 1 <= count <= len(sizes):
        raise ArgumentError(
            f"fragments is {count} for {len(sizes)} parameters: pass 1 to {len(sizes)}"
        )
    total = max(1, sum(sizes))
    runs: list[list[int]] = [[]]
    passed = 0
    for index, size in enumerate(sizes):
        left = len(sizes) - index  # remaining entries, including this one
        needed = count - len(runs)  # remaining runs, excluding the current one
        # True if the middle of the entry is beyond the end of the run, for runs of exactly equal
        # size
        beyond = (2 * passed + size) * count >= 2 * total * len(runs)
        if runs[-1] and needed and (beyond or left == needed):
            runs.append([])
        runs[-1].append(index)
        passed += size
    return runs


def due(step: int, every: int, fragments: int) -> list[int]:
    """Return the fragments that are exchanged after a step. Steps are counted from 1.

    Each fragment is exchanged once in `every` steps, and the exchanges are spread evenly over
    these.

    Example:
        >>> [due(step, every=4, fragments=2) for step in range(1, 9)]
        [[], [0], [], [1], [], [0], [], [1]]
    """
    phase = step % every
    return [f for f in range(fragments) if (f + 1) * every // fragments % every == phase]
