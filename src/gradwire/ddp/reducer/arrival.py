"""What autograd calls: a backward begins, a gradient is ready, the backward ends.

The hot path is `on_gradient`, which runs once for each parameter.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from time import perf_counter_ns
from typing import Any

import torch
from torch import Tensor

from gradwire._scope import runs_outside_contexts
from gradwire._torch import in_compiled_autograd, run_as_written
from gradwire.ddp.buckets.bucket import Bucket
from gradwire.ddp.faults.backward_state import BackwardState, Event
from gradwire.ddp.reducer.backward import Backward
from gradwire.ddp.reducer.finalize import on_end
from gradwire.ddp.reducer.in_backward import has_new_hooks
from gradwire.ddp.reducer.launch_order import has_only_last_left, launch_in_order
from gradwire.ddp.reducer.rpc import rpc_context_error
from gradwire.errors import NotSupportedError, ReductionError

__all__ = ["on_bucket_ready", "on_gradient", "on_local_output", "on_nested_output", "on_output"]

logger = logging.getLogger(__name__)

# names of their own: looking them up in the enum takes longer, and each gradient compares them
RUNNING, RUNNING_AGAIN = BackwardState.RUNNING, BackwardState.RUNNING_AGAIN
EXPECTED, SHORT = BackwardState.EXPECTED, BackwardState.SHORT


@runs_outside_contexts
def on_output(reference: weakref.ref[Backward], _: Tensor, forward: int = 0) -> None:
    """A backward begins at an output: the first after its forward, or another one.

    `forward` is the number of that forward, if it has one.
    """
    backward = reference()
    if backward is None:
        return
    backward.forwards.reach(forward)
    state = backward.state
    if backward.running and not backward.has_turn:
        backward.take_turn()
    if backward.running or state in (BackwardState.LOCAL, BackwardState.FINALIZED):
        return
    if state is BackwardState.REDUCED and backward.usage.static and backward.arrivals is not None:
        if not backward.usage.reaches_parameters():
            return  # torch.autograd.grad, on this rank alone perhaps, which is to send nothing
        with torch.no_grad():
            backward.rebuild_once()  # a static graph's second backward goes by the first one's
    _begin(backward)


@runs_outside_contexts
def on_local_output(reference: weakref.ref[Backward], step: int, _: Tensor) -> None:
    """Begin the backward of a forward under `no_sync`: its weight counts.

    While the backward of another forward is expected, gradients of this one are not that one's.
    `step` is the last one that was prepared before the forward: programs may prepare its backward
    by hand.
    """
    backward = reference()
    if backward is None:
        return
    backward.weights.on_backward()
    if backward.state is not EXPECTED or backward.step != step:
        return
    torch.autograd.Variable._execution_engine.queue_callback(_LocalBackward(backward))


@runs_outside_contexts
def on_nested_output(
    reference: weakref.ref[Backward],
    prepare: weakref.WeakMethod[Callable[..., None]],
    output: Tensor,
) -> None:
    """A backward begins at an output of a forward that ran within another backward."""
    backward, prepare_now = reference(), prepare()
    if backward is None or prepare_now is None:
        return
    if backward.running and torch._C._current_graph_task_id() != backward.task:
        prepare_now()
    on_output(reference, output)


@run_as_written
def on_gradient(
    reference: weakref.ref[Backward], index: int, _: object, incoming: tuple[Any, ...]
) -> None:
    """A parameter's gradient is ready: the one step that is taken for each of them.

    Holds no reference that would keep the reducer alive. `incoming` has one tensor, or None.
    """
    backward = reference()
    if backward is None:
        return
    # no name for incoming[0]: `Ownership.may_write` counts the references to it, and a name would
    # be one more than it allows for
    state = backward.state
    running = state is RUNNING or state is RUNNING_AGAIN
    if not running and (state is not EXPECTED or backward.local) and state is not SHORT:
        if backward.prepare_late is None or backward.local or incoming[0] is None:
            _on_local_gradient(backward, index, incoming)
            return
        _prepare_late(backward)
    if incoming[0] is None:
        _on_undefined(backward, index)
        return
    if not running:
        _begin(backward, index, incoming[0])
    if backward.arrivals is not None:
        backward.arrivals.append(index)
    bucket = backward.buckets.of[index]
    bucket.ready.append(index)
    if index in bucket.early:
        try:
            bucket.copy_in_early(index, incoming)
        except (ReductionError, NotSupportedError) as error:
            backward.domain.fail(error)
    if len(bucket.ready) >= bucket.expected:
        on_bucket_ready(backward, bucket)


def _on_local_gradient(backward: Backward, index: int, incoming: tuple[Any, ...]) -> None:
    """A gradient that stays local: see that nobody else's memory is added to in the next backward.

    No name for incoming[0], as in `on_gradient`.
    """
    if incoming[0] is not None:
        assigner = backward.assigner
        if backward.local:
            backward.came_local.append(index)
        backward.usage.touched.add(index)
        assigner.ownership.make_private(index, assigner.parameters[index], incoming)


@runs_outside_contexts
def _on_undefined(backward: Backward, index: int) -> None:
    """A parameter's node was run, and had no gradient: others may have one."""
    if not backward.running:
        _begin(backward, index)
    if backward.arrivals is not None:
        backward.arrivals.append(index)
    backward.had_undefined = True
    bucket = backward.buckets.of[index]
    bucket.mark_unused([index])
    if bucket.all_ready:
        on_bucket_ready(backward, bucket)


@runs_outside_contexts
def on_bucket_ready(backward: Backward, bucket: Bucket) -> None:
    """A bucket has all its gradients, or more."""
    # may run twice for a bucket, where two of autograd's threads (one a device) bring its last
    # gradients: what is launched is decided under the domain's lock
    if unexpected := bucket.unexpected():
        error = ReductionError(
            f"parameters {unexpected} got a gradient twice in one backward, or one that was "
            "not expected: they are used in several reentrant checkpoints (use "
            "use_reentrant=False, or static_graph=True), or with static_graph=True the "
            "graph is another than in the first backward",
            unexpected,
        )
        backward.domain.fail((backward.reword and backward.reword(error)) or error)
    if not has_only_last_left(backward):
        with torch.no_grad():
            launch_in_order(backward, final=False)


@runs_outside_contexts
def _prepare_late(backward: Backward) -> None:
    """Prepare a backward of what a transform of `torch.func` returned, now that there is one."""
    with backward.domain.lock, torch.no_grad():
        prepare, backward.prepare_late = backward.prepare_late, None
        if prepare is not None and (prepare_now := prepare()) is not None:
            prepare_now()


@runs_outside_contexts
def _begin(backward: Backward, index: int | None = None, incoming: Tensor | None = None) -> None:
    """The first gradient of a backward, or that of an output, is there."""
    with backward.domain.lock:  # on several devices, autograd has a thread for each
        if backward.running:
            return
        _check_may_begin(backward)
        if has_new_hooks():  # registered since the forward
            backward.detach_optimizers()
        if backward.state is BackwardState.REDUCED:
            backward.step += 1
            backward.transition(Event.BEGIN_AGAIN)
            backward.prepare_buckets()
        else:
            backward.transition(Event.BEGIN)
        backward.assigner.ownership.begin(backward.parameters, index, incoming)
        backward.has_turn = False
        if index is None or not backward.usage.find_unused or not backward.others():
            backward.take_turn()
        backward.runs += 1
        backward.task = torch._C._current_graph_task_id()
        engine = torch.autograd.Variable._execution_engine
        engine.queue_callback(_EndOfBackward(backward, backward.runs))
    backward.timer.compute_start = backward.timer.compute_start or perf_counter_ns()
    if torch.is_grad_enabled():
        backward.buckets.defer(with_graph=True)
    if backward.usage.find_unused:
        _mark_unused(backward, at_output=index is None)
    backward.buckets.lend()
    # one loss, with outputs of a forward under `no_sync` that came first
    came, backward.came_local = backward.came_local, []
    for i in came:
        on_gradient(weakref.ref(backward), i, None, (backward.parameters[i].grad,))


def _check_may_begin(backward: Backward) -> None:
    if backward.awaits_finalization:
        backward.raise_not_finalized()
    backward.domain.recover()
    backward.domain.poll_known(backward)
    if (error := rpc_context_error()) is not None:  # of an output made outside of it
        logger.error("%s", error)  # torch.distributed.autograd reports "python_error"
        backward.domain.fail(error)
    if in_compiled_autograd():  # which calls nothing when a backward ends
        backward.domain.fail(
            NotSupportedError(
                "backward() under torch's compiled autograd: its gradients would not be reduced. "
                "Call it outside, or use PyTorch's own DistributedDataParallel with "
                "torch._dynamo.config.optimize_ddp = 'python_reducer'"
            )
        )


def _mark_unused(backward: Backward, *, at_output: bool) -> None:
    """What the graph does not have is unused.

    If that is all, it is known when backward has ended: until then a reentrant checkpoint, whose
    graph is not there yet, may bring some.
    """
    unused = backward.usage.unused_in_graph()
    if unused is None:
        return
    used = len(unused) < len(backward.parameters)
    if used:
        backward.buckets.mark_unused(unused)
    if at_output and any(p.requires_grad for p in backward.parameters):
        # gradients may all have come before the output's, from the loss, or none may come
        backward.takes_part = used or backward.usage.runs_all()


class _EndOfBackward:
    """What autograd calls when a backward ends, and drops uncalled when an exception ends it."""

    def __init__(self, backward: Backward, run: int) -> None:
        self._backward, self._run = backward, run

    @run_as_written
    def __call__(self) -> None:
        on_end(self._backward, self._run)

    def __del__(self) -> None:
        # autograd calls nothing when an exception ends a backward, and only drops its callbacks; a
        # parked backward was called, and waited for one that was not
        backward = self._backward
        if backward.running and self._run == backward.runs:
            backward.interrupt()


class _LocalBackward:
    """Says that a backward of a forward under `no_sync` runs, as long as autograd keeps this."""

    def __init__(self, backward: Backward) -> None:
        self._backward = backward
        backward.local += 1

    def __call__(self) -> None:
        """The backward has ended: autograd drops this, as it does where an exception ends it."""

    def __del__(self) -> None:
        self._backward.local -= 1
        self._backward.came_local.clear()
