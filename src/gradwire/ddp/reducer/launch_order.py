"""Launch order of buckets: the same on every rank, also across a group's reducers.

If two buckets were launched in different orders on two ranks, one would be summed with the other.
The last bucket is held back until backward has ended: its message is the vote.

Reducers of other groups may share the backward, and ranks may reach them in different orders.
Therefore nothing waits for other ranks before the backward has ended. The groups are then finished
one after the other, in the order of their names, which is the same on all ranks
(`finalize.on_end`).

The launch order is that of the `BucketSet`. `BucketAssigner.make` derives it from an order of
parameters that all ranks share: the reverse of their registration, and after the first backward
the order in which rank 0's gradients became ready (`Backward.rebuild_once`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import perf_counter_ns

import torch
from torch.autograd.profiler import record_function

from gradwire.ddp.buckets.bucket import Bucket
from gradwire.ddp.buckets.unpacked import SparseBucket
from gradwire.ddp.faults.protocol import BackwardState
from gradwire.ddp.reducer.backward import Backward
from gradwire.ddp.reducer.launch import Launched
from gradwire.ddp.reducer.tally import Tally
from gradwire.errors import ReductionError
from gradwire.recorder import record_error, ring


def launch_in_order(backward: Backward, *, final: bool, ended: bool = False) -> None:
    """Launch every ready bucket whose predecessors were launched; the last one only if `final`.

    Reducers that share a backward launch one after the other, and so do their last buckets at the
    end: a gradient missing on one rank must not make buckets of two reducers meet.

    Args:
        backward: Backward that the buckets belong to.
        final: If True, the last bucket, which is the vote, is launched, too. An earlier failure
            keeps it from being sent, so that no rank takes the result.
        ended: If True, this may wait for other ranks, because backward has ended.
    """
    ended = ended or final
    turn = backward.turn
    if not turn.taken or any(not has_only_last_left(b) for b in turn.predecessors):
        return
    _launch_ready(backward, final=final, ended=ended)
    if not final and has_only_last_left(backward):
        for other in backward.others():
            if backward in other.turn.predecessors:  # may have waited for this one alone
                launch_in_order(other, final=False, ended=ended)


def has_only_last_left(backward: Backward) -> bool:
    """Return True if all buckets but the last have been launched."""
    # read without the lock: the list only grows while autograd runs, and `_launch_ready` checks
    # it again
    launched = len(backward.launcher.launched)
    return launched >= len(backward.buckets) or _is_last(backward, launched)


def all_launched(backward: Backward) -> bool:
    """Return True if all buckets have been launched."""
    return len(backward.launcher.launched) >= len(backward.buckets)


def launch_filled(backward: Backward, bucket: Bucket, *, is_last: bool) -> None:
    """Launch a bucket whose buffer is filled. If it is the vote, the backward is COMMITTING."""
    if backward.launcher.scale is None:
        agree_on_scale(backward)
    votes = backward.launcher.hook is None and not backward.usage.allows_unused
    # a sparse bucket may need a second message: `finalize` counts it once that is sent
    if is_last and votes and not isinstance(bucket, SparseBucket):
        backward.launcher.send_rest()
        backward.sending_last()
    backward.launcher.launch(bucket, is_last=is_last)


def agree_on_scale(backward: Backward, own: Tally | None = None) -> None:
    """Set the factor of a hook's buckets, before the first one is launched.

    Args:
        backward: Backward that the buckets belong to.
        own: Summands of this rank; None for those of its backward.
    """
    launcher, factor = backward.launcher, None
    if launcher.hook is not None and not launcher.hook.linear:
        sums = launcher.add_up(backward.tally() if own is None else own)
        factor = backward.weights.factor(sums, backward.ranks)
    launcher.scale = launcher.correction * (1.0 if factor is None else factor)


def _launch_ready(backward: Backward, *, final: bool, ended: bool) -> None:
    """Fill and launch the next buckets, up to the first one that is not ready."""
    buckets, launched = backward.buckets, backward.launcher.launched
    if not ended and not backward.domain.name and _may_share(backward):
        return
    # autograd runs one thread per device: only one at a time selects and launches the next bucket
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
            if backward.streams.join(bucket.parameters[0].device):
                bucket.record_use_of_gradients()
            _profiled("pack", backward.launcher.copy_in, bucket)
            if bucket.extra_numel:
                backward.tally().write(bucket.extra)
            backward.timer.comm_start = backward.timer.comm_start or perf_counter_ns()
            before = 0 if record is None else backward.domain.log.position()
            if record is not None:
                record.packed = perf_counter_ns()
                ring.check_bucket(record, bucket.parameters)
            _profiled("send", partial(launch_filled, backward, is_last=is_last), bucket)
            if record is not None:
                record.sent = perf_counter_ns()
                record.nbytes = 0 if isinstance(bucket, SparseBucket) else bucket.flat.nbytes
                record.first, record.last = before + 1, backward.domain.log.position()
                launched[-1].record = record


def _waits(backward: Backward, bucket: Bucket) -> bool:
    """Return True if the launch of a bucket may wait for other ranks."""
    future, launcher = backward.domain.hook_future, backward.launcher
    if launcher.hook is None:
        return future is not None and not future.done()  # that of another reducer's hook
    if launcher.scale is None and not launcher.hook.linear:
        return True  # `agree_on_scale`
    return isinstance(bucket, SparseBucket) or (future is not None and not future.done())


def _may_share(backward: Backward) -> bool:
    """Return True if reducers of other groups may take part in the running backward."""
    return any(b.running or b.state is BackwardState.EXPECTED for b in backward.domain.elsewhere())


def _profiled(what: str, function: Callable[[Bucket], None], bucket: Bucket) -> None:
    """Call a function of a bucket, as a range in the trace of the profiler if one is enabled."""
    if not torch.autograd._profiler_enabled():
        function(bucket)
        return
    with record_function(f"gradwire: {what} {bucket.what}"):
        function(bucket)


def _is_last(backward: Backward, index: int) -> bool:
    """Return True if no bucket after this one has anything to send."""
    if not backward.skip_unused:
        return index + 1 == len(backward.buckets)
    return all(len(b.unused) == len(b.members) for b in backward.buckets.after(index))


def check_over(backward: Backward) -> None:
    """Raise if ranks wait for this backward. Called before other communication.

    The check includes backwards of the group's other modules, as in `Join([generator,
    discriminator])`: a rank that has run out of input takes part in the forward and the backward of
    one module, then in those of the next.

    Raises:
        ReductionError: A forward had no backward.
    """
    shadowed = [b for b in (backward, *backward.others()) if b.shadowed]
    if any(b.state is BackwardState.AWAITING for b in shadowed):
        backward.raise_not_finalized()
    if any(b.state in (BackwardState.EXPECTED, BackwardState.SHORT) for b in shadowed):
        backward.raise_if_unfinished()
        backward.domain.fail(
            ReductionError(
                "a forward in join() had no backward, for which ranks that have run out of input "
                "wait: run it under no_sync() or torch.no_grad(), or its backward first"
            )
        )


def check_first(backward: Backward) -> None:
    """Raise for a second backward of one forward, before its first message.

    Ranks that have run out of input take part in the first one only. Then they wait for the next
    forward, and do not resynchronize before it. As nothing was sent, the ranks stay in step.

    Raises:
        ReductionError: This is the second backward of a forward.
    """
    if backward.shadowed and backward.state is BackwardState.RUNNING_AGAIN:
        backward.buckets.take_back()
        backward.reset()
        error = ReductionError(
            "a second backward of one forward in join(), for which ranks that have run out of "
            "input do not wait: run one backward of the sum of the losses"
        )
        record_error(error)
        raise error
