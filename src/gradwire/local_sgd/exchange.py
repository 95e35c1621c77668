"""Schedule of the exchanged parameters, and the reduction of one bucket of them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor

from gradwire._engine_errors import backend_failure, is_over, is_transport
from gradwire.ddp.faults.fault_domain import FaultDomain
from gradwire.ddp.faults.other_messages import LOST
from gradwire.ddp.faults.waiting import wait_future
from gradwire.errors import ArgumentError, DistributedError, HookError
from gradwire.hooks import GradBucket, StatefulHook, as_future, hook_name, parse_hook_result


def reduce_bucket(hook: StatefulHook[Any], bucket: GradBucket, domain: FaultDomain) -> Tensor:
    """Reduce a bucket with a hook, wait for it, and return the result.

    Args:
        hook: Communication hook.
        bucket: Bucket to reduce.
        domain: Fault domain of the group, which reports a failure to the other ranks.

    Raises:
        PeerLostError, CollectiveTimeoutError: Another rank was lost, or did not take part in time.
        HookError: The hook failed in another way.
        BrokenGroupError: The group failed before.
    """
    if domain.broken is not None:
        domain.raise_deferred()
    since, poll = time.monotonic(), partial(domain.poll_lost, look=True)
    try:
        future = as_future(hook.run_hook(bucket), hook)
        if late := wait_future(future, poll, domain.seconds):
            raise late
        return parse_hook_result(future.wait(), bucket, hook)
    except DistributedError as error:
        if domain.broken is None and isinstance(error, LOST):
            domain.give_up(error, error.__cause__)
        raise
    except Exception as error:
        what = f"hook {hook_name(hook)}, bucket {bucket.index()}"
        if not is_transport(error):
            raise HookError(f"{what}: {type(error).__name__}: {error}") from error
        timed_out = is_over(since, domain.seconds)
        domain.give_up(backend_failure(error, what, timed_out=timed_out), error)


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
