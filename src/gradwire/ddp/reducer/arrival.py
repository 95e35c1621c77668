"""Hooks that autograd calls when a backward begins, a gradient is ready, or the backward ends.

The hot path is `on_gradient`, which runs once per parameter.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from functools import partial
from time import perf_counter_ns
from typing import Any

import torch
from torch import Tensor

from gradwire._scope import runs_outside_contexts
from gradwire._torch import in_compiled_autograd, run_as_written
from gradwire.ddp.buckets.bucket import Bucket
from gradwire.ddp.faults.protocol import BackwardState
from gradwire.ddp.outputs import mark_output
from gradwire.ddp.reducer.backward import Backward
from gradwire.ddp.reducer.finalize import on_end
from gradwire.ddp.reducer.launch_order import has_only_last_left, launch_in_order
from gradwire.errors import NotSupportedError, ReductionError

# module-level names: an enum lookup is slower, and every gradient compares its state with them
RUNNING, RUNNING_AGAIN = BackwardState.RUNNING, BackwardState.RUNNING_AGAIN
EXPECTED, SHORT = BackwardState.EXPECTED, BackwardState.SHORT


def expect(backward: Backward, outputs: Iterable[Tensor], *, counted: bool) -> None:
    """See `Reducer.expect`."""
    begun = [t for t in outputs if t.requires_grad and t.grad_fn is not None]
    if not begun:
        return
    forward = backward.forwards.begin() if counted else None
    number = 0 if forward is None else forward.number
    call = partial(on_output, weakref.ref(backward), forward=number)
    for tensor in begun:
        tensor.register_hook(call)
        if forward is not None:
            mark_output(tensor, forward)


def expect_local(backward: Backward, outputs: Iterable[Tensor]) -> None:
    """See `Reducer.expect_local`."""
    weighted = backward.weights.in_use or backward.usage.find_unused
    backward.prepare_late = None
    if backward.state is not EXPECTED and not weighted:
        return  # the common case: gradients stay local
    constant = True
    for tensor in outputs:
        if tensor.requires_grad:
            constant = False
        if tensor.requires_grad and tensor.grad_fn is not None:
            tensor.register_hook(partial(on_local_output, weakref.ref(backward), backward.step))
    if constant:
        backward.weights.on_constant()


def expect_nested(
    backward: Backward, outputs: Iterable[Tensor], prepare: Callable[..., None]
) -> None:
    """See `Reducer.expect_nested`."""
    for tensor in outputs:
        if tensor.requires_grad and tensor.grad_fn is not None:
            references = weakref.ref(backward), weakref.WeakMethod(prepare)
            tensor.register_hook(partial(on_nested_output, *references))


@runs_outside_contexts
def on_output(reference: weakref.ref[Backward], _: Tensor, forward: int = 0) -> None:
    """Begin a backward at an output: the first one after the forward, or a later one.

    `forward` is the number of the forward, or 0 if it has none.
    """
    backward = reference()
    if backward is None:
        return
    backward.forwards.reach(forward)
    state = backward.state
    if backward.running and not backward.turn.taken:
        backward.take_turn()
    if backward.running or state in (BackwardState.LOCAL, BackwardState.FINALIZED):
        return
    if state is BackwardState.REDUCED and backward.must_rebuild:
        if not backward.usage.reaches_parameters():
            return  # torch.autograd.grad sends nothing: perhaps only this rank calls it
        with torch.no_grad():
            backward.rebuild_once()  # static graph: in the order of the first backward
    _begin(backward)


@runs_outside_contexts
def on_local_output(reference: weakref.ref[Backward], step: int, _: Tensor) -> None:
    """Begin the backward of a forward under `no_sync`, and count its weight.

    While the backward of another forward is expected, the gradients of this one do not belong to
    it. `step` is the last step prepared before the forward: a program may also prepare the backward
    of this forward by hand.
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
    """Begin a backward at an output of a forward that ran within another backward."""
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
    """Handle a parameter's gradient: the reducer's work per parameter.

    Holds only a weak reference to the backward, so that the hook does not keep the reducer alive.
    `incoming` has one element: a tensor or None.
    """
    backward = reference()
    if backward is None:
        return
    # do not bind incoming[0] to a name: `Ownership.may_write` counts references to it, and a name
    # would add one
    state = backward.state
    running = state is RUNNING or state is RUNNING_AGAIN
    if not running and (state is not EXPECTED or backward.local.running) and state is not SHORT:
        if backward.prepare_late is None or backward.local.running or incoming[0] is None:
            _on_local_gradient(backward, index, incoming)
            return
        _prepare_late(backward)
    if incoming[0] is None:
        _on_undefined(backward, index)
        return
    if not running:
        _begin_outside(backward, index, incoming[0])
    if (arrivals := backward.order.arrivals) is not None:
        arrivals.append(index)
    if index in backward.streams.unknown:
        backward.streams.record(index)
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
    """Handle a gradient that stays local.

    The next backward adds to it in place, so its memory must not belong to another tensor. As in
    `on_gradient`, incoming[0] is not bound to a name.
    """
    if incoming[0] is not None:
        assigner = backward.assigner
        backward.local.note(index)
        backward.usage.touched.add(index)
        assigner.ownership.make_private(assigner.parameters[index], incoming)


@runs_outside_contexts
def _on_undefined(backward: Backward, index: int) -> None:
    """Handle an undefined gradient: the parameter's node ran, but received None."""
    if not backward.running:
        _begin(backward, index)
    backward.order.note(index)
    backward.had_undefined = True
    bucket = backward.buckets.of[index]
    bucket.mark_unused([index])
    if bucket.all_ready:
        on_bucket_ready(backward, bucket)


@runs_outside_contexts
def on_bucket_ready(backward: Backward, bucket: Bucket) -> None:
    """Launch what can be launched once a bucket has all of its gradients, or too many."""
    # may run twice for a bucket if two of autograd's threads (one per device) deliver its last
    # gradients: the domain's lock decides which of them launches it
    if unexpected := bucket.unexpected():
        error = ReductionError(
            f"parameters {unexpected} got a gradient twice in one backward, or one that was "
            "not expected: they are used in several reentrant checkpoints (set "
            "use_reentrant=False or static_graph=True), or with static_graph=True the graph "
            "differs from that of the first backward",
            unexpected,
        )
        backward.domain.fail((backward.reword and backward.reword(error)) or error)
    if not has_only_last_left(backward):
        with torch.no_grad():
            launch_in_order(backward, final=False)


@runs_outside_contexts
def _prepare_late(backward: Backward) -> None:
    """Prepare the backward of a `torch.func` transform's result once that backward has begun."""
    with backward.domain.lock, torch.no_grad():
        prepare, backward.prepare_late = backward.prepare_late, None
        if prepare is not None and (prepare_now := prepare()) is not None:
            prepare_now()


def _begin(backward: Backward, index: int | None = None, incoming: Tensor | None = None) -> None:
    """Begin a backward at its first gradient, of a parameter or of an output."""
    with backward.domain.lock:  # autograd runs one thread per device
        if backward.running:
            return
        _check_may_begin(backward)
        run = backward.begin(index, incoming)
        torch.autograd.Variable._execution_engine.queue_callback(_EndOfBackward(backward, run))
    backward.timer.compute_start = backward.timer.compute_start or perf_counter_ns()
    if torch.is_grad_enabled():
        backward.buckets.defer(with_graph=True)
    if backward.usage.find_unused:
        _mark_unused(backward, at_output=index is None)
    backward.buckets.lend()
    # gradients of a forward under `no_sync` in the same loss, which arrived first
    for i in backward.local.take():
        on_gradient(weakref.ref(backward), i, None, (backward.parameters[i].grad,))


_begin_outside = runs_outside_contexts(_begin)


def _check_may_begin(backward: Backward) -> None:
    if backward.awaits_finalization:
        backward.raise_not_finalized()
    backward.domain.report_interrupted()
    backward.domain.poll_known(backward)
    if in_compiled_autograd():  # does not run callbacks at the end of a backward
        backward.domain.fail(
            NotSupportedError(
                "backward() under torch's compiled autograd: its gradients would not be reduced. "
                "Call it outside, or use PyTorch's own DistributedDataParallel with "
                "torch._dynamo.config.optimize_ddp = 'python_reducer'"
            )
        )


def _mark_unused(backward: Backward, *, at_output: bool) -> None:
    """Mark the parameters that the graph does not reach as unused.

    If it reaches none, wait until the backward has ended: a reentrant checkpoint builds its graph
    during backward, and may reach some.
    """
    unused = backward.usage.unused_in_graph()
    if unused is None:
        return
    used = len(unused) < len(backward.parameters)
    if used:
        backward.buckets.mark_unused(unused)
    if at_output and any(p.requires_grad for p in backward.parameters):
        # all gradients may have arrived before that of the output, from the loss, or none may come
        backward.takes_part = used or backward.usage.runs_all()


class _EndOfBackward:
    """Callback at the end of a backward; autograd drops it uncalled after an exception."""

    def __init__(self, backward: Backward, run: int) -> None:
        self._backward, self._run = backward, run

    @run_as_written
    def __call__(self) -> None:
        on_end(self._backward, self._run)

    def __del__(self) -> None:
        # after an exception, autograd drops its callbacks without calling them; the callback of a
        # parked backward did run, and the backward waited for another whose callback did not
        backward = self._backward
        if backward.running and self._run == backward.runs:
            backward.interrupt()


class _LocalBackward:
    """Count a running backward of a forward under `no_sync` for as long as autograd keeps this."""

    def __init__(self, backward: Backward) -> None:
        self._backward = backward
        backward.local.begin()

    def __call__(self) -> None:
        """Do nothing: autograd then drops this object, as it does after an exception."""

    def __del__(self) -> None:
        self._backward.local.end()
