"""End of a backward: wait for its buckets and write the results to the gradients.

Either all ranks receive the same results, or none does: the last message serves as the vote.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from time import perf_counter_ns

import torch
from torch import Tensor

from gradwire._scope import runs_outside_contexts
from gradwire.ddp.faults.protocol import BackwardState, Event
from gradwire.ddp.reducer.backward import Backward
from gradwire.ddp.reducer.bypasses import step_and_clear
from gradwire.ddp.reducer.launch import Launched
from gradwire.ddp.reducer.launch_order import (
    agree_on_scale,
    all_launched,
    launch_filled,
    launch_in_order,
)
from gradwire.ddp.reducer.tally import Tally
from gradwire.ddp.reducer.weights import NO_WEIGHTS_BUCKET
from gradwire.errors import ArgumentError, MismatchError, NotSupportedError, ReductionError
from gradwire.recorder import ring

logger = logging.getLogger(__name__)


@runs_outside_contexts
def on_end(backward: Backward, run: int) -> None:
    """End the backward with this number: autograd has run all of it."""
    if backward.state is BackwardState.FINALIZED and run == backward.runs:  # in one of its hooks
        backward.transition(Event.END_UNTOUCHED)
        return
    if run != backward.runs or not backward.running:
        backward.domain.poll_known(backward)  # another reducer's backward failed
        return
    try:
        _check_converted(backward)
        sharing = backward.sharing()
        if backward.untouched:
            _end_untouched(backward)
        elif sharing:
            backward.parked = True
        else:
            _end(backward)
        if sharing or backward.others():  # else none is parked
            _end_parked(backward)
    except BaseException:
        backward.interrupt()
        raise


def _end_parked(backward: Backward) -> None:
    """End the reducers of several groups that share a backward once all have reached its end.

    Each reducer waits for the ranks of its group. Group names are the same on all ranks, so waits
    in the order of names cannot form a cycle: ranks of the first unfinished group wait for no
    other.
    """
    together = {id(b): b for b in (backward, *backward.sharing())}
    for one in [*together.values()]:
        together |= {id(b): b for b in one.others() if b.running and b.task == one.task}
    parked = [b for b in together.values() if b.parked]
    if not parked or any(b.running and not b.parked for b in together.values()):
        return
    for one in parked:
        if not one.domain.name:
            one.domain.channel.start_connecting(one.group)
    for one in parked:
        one.domain.connect()
    for one in sorted(parked, key=lambda b: b.domain.name):
        if one.parked and one.running:
            one.parked = False
            try:
                _end(one)
            except BaseException:
                one.interrupt()
                raise


def _check_converted(backward: Backward) -> None:
    """Raise if a parameter received a gradient without triggering the reducer's hook."""
    silent = {*backward.buckets.missing(), *backward.buckets.unused()}
    if silent and (converted := backward.usage.converted(sorted(silent))):
        names = [backward.names[i] for i in converted]
        backward.domain.fail(
            ArgumentError(
                f"parameters {names} were converted after the module was wrapped, to another dtype "
                "or device or by swap_tensors: their gradients are not reduced. Convert the module "
                "before it is wrapped, or call refit() on every rank afterwards"
            )
        )


def _end_untouched(backward: Backward) -> None:
    """End a backward that reached none of the parameters, such as that of an earlier module."""
    backward.buckets.reset()
    backward.transition(Event.END_UNTOUCHED)
    if backward.state is BackwardState.EXPECTED:
        backward.prepare_buckets()
    backward.give_turn_up()
    _finalize_others(backward)


def _end(backward: Backward) -> None:
    backward.timer.compute_end = perf_counter_ns()
    with torch.no_grad():
        _mark_missing(backward)
        if not backward.turn.taken:
            backward.take_turn()
        if not backward.turn.predecessors:
            _launch_others(backward)
            launch_in_order(backward, final=True)
        if not all_launched(backward):
            backward.transition(Event.END_SHORT)  # another backward may deliver the rest
            backward.buckets.take_back()
        elif not backward.manual:
            finalize_backward(backward)
            _finalize_others(backward)
        elif backward.state is not BackwardState.COMMITTING:
            backward.transition(Event.END_MANUAL)


def _launch_others(backward: Backward) -> None:
    """Launch the buckets that other reducers launch before its last one on ranks that use more."""
    if others := backward.others():
        for other in others:
            if other.running and other.task == backward.task and not other.untouched:
                _mark_missing(other)
        launch_in_order(backward, final=False, ended=True)


def _mark_missing(backward: Backward) -> None:
    """Mark parameters that received no gradient, and may receive none, as unused."""
    if backward.usage.recording:
        backward.buckets.complete()
    elif missing := backward.buckets.missing():
        needed = (i for i in missing if backward.parameters[i].requires_grad)
        if backward.usage.find_unused or next(needed, None) is None:
            backward.buckets.mark_unused(missing)


def finalize_manually(backward: Backward) -> None:
    """End a backward with manual finalization, after it or in one of its hooks.

    Raises:
        ReductionError: Finalization is not manual, there is nothing to end, or gradients are
            missing.
    """
    running = backward.running
    ended = (BackwardState.SHORT, BackwardState.AWAITING, BackwardState.COMMITTING)
    if not backward.manual or not (running or backward.state in ended):
        raise ReductionError(
            "there is no reduction to finalize: set require_manual_backward_finalization "
            "before a forward outside no_sync(), run its backward, and call "
            "finalize_backward() once"
        )
    with torch.no_grad():
        if running and not backward.turn.taken:
            backward.take_turn()
        if running and not backward.turn.predecessors:
            launch_in_order(backward, final=True)
        if not all_launched(backward):
            _check_converted(backward)
            lacking = [backward.names[i] for i in sorted(backward.buckets.missing())]
            raise ReductionError(
                f"parameters {lacking} have no gradient yet: call finalize_backward() when all "
                "have one, and after backward while should_finalize_after_backward is true",
                lacking,
            )
        if running:
            backward.timer.compute_end = perf_counter_ns()
        try:
            finalize_backward(backward)
        except BaseException:
            backward.interrupt()
            raise
    if running:
        backward.transition(Event.FINALIZE)  # autograd has not reached its end yet
    _finalize_others(backward)


def _finalize_others(backward: Backward) -> None:
    """End the reducers that reached the end of backward before this one, and waited for it."""
    for other in backward.others():
        waited = other.state is BackwardState.SHORT and not other.turn.predecessors
        if waited and not other.buckets.missing():
            other.transition(Event.BEGIN)  # `on_end` ends running backwards only
            on_end(other, other.runs)


def finalize_backward(backward: Backward) -> None:
    """Wait for the buckets, and write the results to the gradients."""
    buckets, usage, parameters = backward.buckets, backward.usage, backward.parameters
    unused = buckets.unused()
    untouched = {i for i in unused if not parameters[i].requires_grad}
    results, factor = _receive(backward, buckets.ready())
    if usage.allows_unused:
        untouched |= usage.unused
    for launched, reduced in zip(backward.launcher.launched, results, strict=True):
        launched.bucket.copy_out(_weighted(launched, reduced, factor), untouched)
    backward.assigner.lay_as_parameters()
    step_and_clear(backward.optimized)
    backward.timer.sent = sum(launched.sent for launched in backward.launcher.launched)
    timer = backward.timer
    timer.unused_here = tuple(backward.names[i] for i in sorted(unused))
    if unused:
        logger.debug("step %d: unused here: %s", backward.step, timer.unused_here)
    timer.comm_end = perf_counter_ns()
    times = timer.forward_start, timer.compute_start, timer.compute_end, timer.comm_end
    ring.add_step(backward.step, *times)
    backward.commit(buckets.ready())


def shadow(backward: Backward) -> None:
    """Take part in the other ranks' backward with zero gradients."""
    try:
        with torch.no_grad(), backward.domain.lock:
            backward.domain.connect()
            agree_on_scale(backward, Tally())
            for number, bucket in enumerate(backward.buckets, 1):
                bucket.zero()
                launch_filled(backward, bucket, is_last=number == len(backward.buckets))
            _receive(backward, (), Tally())
    except BaseException:
        backward.interrupt()
        raise
    backward.commit(range(len(backward.parameters)), joined=True)


def _receive(
    backward: Backward, used: Iterable[int], own: Tally | None = None
) -> tuple[list[Tensor | None], float | None]:
    """Send the remaining messages and wait for all results.

    A communication hook may fail after its collectives: ranks then vote. Without a hook, the last
    message is the vote.

    Args:
        backward: Backward whose buckets are waited for.
        used: Parameters that got a gradient on this rank.
        own: Summands of this rank in the vote; None for those of its backward.

    Returns:
        The result of each bucket, or None if it is in the bucket's buffer; and the factor still to
        be applied to all of them, or None.
    """
    launcher, usage, asked = backward.launcher, backward.usage, None
    launcher.send_rest()
    if usage.allows_unused:
        if launcher.hook is None:
            backward.sending_last()
        asked = launcher.start_sum(usage.flags(used))
    if launcher.hook is None and backward.state is not BackwardState.COMMITTING:
        # the last bucket was sparse, or skipped: its messages have been sent
        backward.sending_last(sent=True)
    if asked is not None:
        flags, work = asked
        launcher.wait_small(work)
        usage.receive(flags)
    results = []
    for launched in backward.launcher.launched:
        since = perf_counter_ns()
        results.append(launcher.result(launched))
        backward.timer.waits.append(perf_counter_ns() - since)
    if launcher.hook is not None:
        backward.sending_last()
        sums = launcher.vote(backward.tally() if own is None else own)
        _check_in_step(backward, sums)
        if not launcher.hook.linear:  # its gradients were already weighted
            return results, None
        return results, backward.weights.factor(sums, backward.ranks)
    return results, _factor_from_bucket(backward)


def _check_in_step(backward: Backward, sums: Tally) -> None:
    """Raise on every rank if the ranks' gradients belong to different steps.

    Raises:
        MismatchError: Ranks skipped different numbers of backwards; lists the numbers.
    """
    if sums.in_step:
        return
    domain, (skipped, _) = backward.domain, backward.forwards.count()
    counts = domain.channel.exchange("skipped forwards", skipped, domain.seconds)
    held = "; ".join(f"rank {r}: {n}" for r, n in enumerate(counts or ()))
    domain.fail(
        MismatchError(
            "gradients of different steps meet: ranks have called forward, and then not "
            f"backward, different numbers of times: {held or 'not known'}. Call backward after "
            "each forward on every rank, or leave a batch out on all ranks (skip_if_any); call "
            "a forward that has no backward under torch.no_grad() or no_sync()"
        )
    )


def _factor_from_bucket(backward: Backward) -> float | None:
    """Return the factor, from the sums of weights that arrived with a bucket."""
    given = backward.weights.given is not None
    if (weights_bucket := backward.buckets.weights_bucket) is None:
        if given:
            backward.domain.fail(NotSupportedError(NO_WEIGHTS_BUCKET))
        return None
    # on an accelerator, reading the sums blocks the CPU: only ranks with a weight do so there,
    # and they report a mismatch
    if not given and weights_bucket.flat.device.type != "cpu":
        return None
    sums = Tally.read(weights_bucket.extra)
    _check_in_step(backward, sums)
    return backward.weights.factor(sums, backward.ranks)


def _weighted(launched: Launched, reduced: Tensor | None, factor: float | None) -> Tensor | None:
    """Return the mean over samples if weights were given, from the mean over ranks."""
    if factor is None or factor == 1.0 or not launched.sent:  # all weights are equal
        return reduced
    if reduced is not None:
        return reduced * factor
    launched.bucket.flat.mul_(factor)
    return None
