"""Which bucket is launched when: in one order on every rank, also across a group's reducers.

A bucket that is launched before another on one rank and after it on the next would be summed with
it. The last bucket is kept back until backward has ended: its message is the vote.

Reducers of other groups may share the backward, too, and other ranks may reach them in another
order. So nothing waits for other ranks before the backward has ended; then the groups are finished
one after the other, by their names, in the same order on all ranks (`finalize.on_end`).

The order is that of the `BucketSet`. `BucketAssigner.make` decides it, from an order of parameters
that all ranks have: the reverse of their registration, and after the first backward that in which
rank 0's gradients became ready (`Backward.rebuild_once`).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from time import perf_counter_ns
from typing import Any

import torch
from torch.autograd.profiler import record_function

from gradwire.ddp.buckets.bucket import Bucket
from gradwire.ddp.buckets.sparse import SparseBucket
from gradwire.ddp.faults.backward_state import BackwardState
from gradwire.ddp.reducer.backward import Backward
from gradwire.ddp.reducer.launch import Launched
from gradwire.ddp.reducer.shadowed import check_first
from gradwire.ddp.reducer.tally import Tally
from gradwire.recorder import ring


def launch_in_order(backward: Backward, *, final: bool, ended: bool = False) -> None:
    """Launch every ready bucket whose predecessors have been launched; the last only if `final`.

    Reducers that share a backward go one after the other, their last buckets at the end likewise:
    a gradient that one of them lacks on one rank must not let another's bucket meet its own.

    Args:
        backward: Whose buckets they are.
        final: Whether backward has ended. Whatever fails before, fails before all ranks have sent
            the last bucket, and so none of them takes the result.
        ended: True if backward has ended, so that this may wait for other ranks.
    """
    ended = ended or final
    if not backward.has_turn or any(not has_only_last_left(b) for b in backward.predecessors):
        return
    _launch_ready(backward, final=final, ended=ended)
    if not final and has_only_last_left(backward):
        for other in backward.others():
            if backward in other.predecessors:  # it may have waited for this one alone
                launch_in_order(other, final=False, ended=ended)


def has_only_last_left(backward: Backward) -> bool:
    """Whether all buckets have been launched but the last."""
    # read without the lock: the list only grows while autograd runs, and `_launch_ready` looks
    # again
    launched = len(backward.launcher.launched)
    return launched >= len(backward.buckets) or _is_last(backward, launched)


def all_launched(backward: Backward) -> bool:
    """Whether all buckets have been launched."""
    return len(backward.launcher.launched) >= len(backward.buckets)


def launch_filled(backward: Backward, bucket: Bucket, *, is_last: bool) -> None:
    """Launch a bucket whose buffer is filled; the backward is COMMITTING if this is its vote."""
    if backward.launcher.scale is None:
        agree_on_scale(backward)
    votes = backward.launcher.hook is None and not backward.usage.allows_unused
    # a sparse bucket is several messages: `finalize` counts when they are sent
    if is_last and votes and not isinstance(bucket, SparseBucket):
        backward.sending_last()
    backward.launcher.launch(bucket, is_last=is_last)


def agree_on_scale(backward: Backward, own: Tally | None = None) -> None:
    """Before the first bucket: set what a hook's buckets are multiplied by.

    Args:
        backward: Whose buckets they are.
        own: Numbers that this rank adds to those of the others; None: those of its backward.
    """
    launcher, factor = backward.launcher, None
    if launcher.hook is not None and not launcher.hook.linear:
        sums = launcher.add_up(backward.tally() if own is None else own)
        factor = backward.weights.factor(sums, backward.ranks)
    launcher.scale = launcher.correction * (1.0 if factor is None else factor)


def _launch_ready(backward: Backward, *, final: bool, ended: bool) -> None:
    """Fill and launch the buckets that come next, as far as they are ready."""
    buckets, launched = backward.buckets, backward.launcher.launched
    if not ended and not backward.domain.name and _may_share(backward):
        return
    # on several devices, autograd has a thread for each: the next bucket is found and launched
    # by one of them at a time
    with backward.domain.lock:
        backward.domain.poll_known(backward)  # nothing is sent while ranks resynchronize
        backward.domain.connect()
        check_first(backward)
        while len(launched) < len(buckets):
            bucket = buckets[len(launched)]
            is_last = _is_last(backward, len(launched))
            if not ended and _waits(backward, bucket) and _may_share(backward):
                return
            if not bucket.all_ready or (is_last and not final):
                return
            if backward.skip_unused and len(bucket.unused) == len(bucket.members):
                launched.append(Launched(bucket))
                continue
            step, names = backward.step, bucket.names
            record = ring.begin_bucket(backward.group, step, len(launched), names)
            with _range(bucket, "pack"):
                backward.launcher.copy_in(bucket)
            if bucket.extra_numel:
                backward.tally().write(bucket.flat)
            backward.timer.comm_start = backward.timer.comm_start or perf_counter_ns()
            before = 0 if record is None else backward.domain.position()
            if record is not None:
                record.packed = perf_counter_ns()
            with _range(bucket, "send"):
                launch_filled(backward, bucket, is_last=is_last)
            if record is not None:
                record.sent = perf_counter_ns()
                record.nbytes = 0 if isinstance(bucket, SparseBucket) else bucket.flat.nbytes
                record.first, record.last = before + 1, backward.domain.position()
                launched[-1].record = record


def _waits(backward: Backward, bucket: Bucket) -> bool:
    """Return True if the launch of a bucket may wait for other ranks."""
    future, launcher = backward.domain.hook_future, backward.launcher
    if launcher.scale is None and launcher.hook is not None and not launcher.hook.linear:
        return True  # `agree_on_scale`
    return isinstance(bucket, SparseBucket) or (future is not None and not future.done())


def _may_share(backward: Backward) -> bool:
    """Return True if reducers of other groups may take part in the running backward."""
    return any(b.running or b.state is BackwardState.EXPECTED for b in backward.elsewhere())


def _range(bucket: Bucket, what: str) -> AbstractContextManager[Any]:
    """A range in a profiler's trace, if one is on."""
    if not torch.autograd._profiler_enabled():
        return nullcontext()
    return record_function(f"gradwire: {what} {bucket.what}")


def _is_last(backward: Backward, index: int) -> bool:
    """Whether no bucket after this one has anything to send."""
    if not backward.skip_unused:
        return index + 1 == len(backward.buckets)
    return all(len(b.unused) == len(b.members) for b in backward.buckets.after(index))
