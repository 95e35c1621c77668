"""Reducer: averages gradients over ranks while backward is still computing others.

Each parameter reports once per backward that its gradient is ready. When all parameters of a bucket
have done so, the bucket is launched, in the same order on every rank. At the end of backward, the
reducer waits for the buckets in that order and writes the results to the gradients: all of this is
in `Backward`. `average_gradients` in `tests/ddp/naive.py` computes the same without buckets.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, repeat
from time import perf_counter_ns
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from gradwire._containers import leaves, map_tensors, tensors_in
from gradwire._groups import check_group
from gradwire._scope import runs_outside_contexts
from gradwire.ddp.arguments import ReducerOptions, in_attributes, may_hold, remove_hooks_with
from gradwire.ddp.buckets.assignment import BucketSet
from gradwire.ddp.faults.protocol import BackwardState, Event
from gradwire.ddp.reducer.backward import Backward, on_gradient
from gradwire.ddp.reducer.weights import NO_BUCKET, NOT_SENT, Tally, Usage, accumulation_node
from gradwire.errors import ArgumentError, NotSupportedError, ReductionError
from gradwire.hooks import (
    CommHook,
    StatefulHook,
    bind_hook,
    hook_name,
    is_mean_over,
    run_in_group,
)

REDUCER = "gradwire.ddp.reducer"
"""Key in a parameter's node of autograd: the parameter's reducer, and its name there."""


@dataclass(frozen=True)
class BucketLog:
    """One bucket.

    Attributes:
        parameters: Names of the parameters, in the bucket's order.
        bytes: Size of their gradients.
        wait_seconds: Time that the end of the last backward waited for the bucket.
    """

    parameters: tuple[str, ...]
    bytes: int
    wait_seconds: float


@dataclass(frozen=True)
class LoggingData:
    """Record of a wrapped module's last step that reduced gradients.

    Attributes:
        steps: Number of forwards that were followed by a reduction, or are about to be.
        buckets: Buckets in launch order.
        buckets_sent: Number of buckets that had anything to send in the last step.
        rebuilt: True if the buckets follow the order in which gradients become ready.
        unused: Parameters that no rank used in the last step; None without
            `find_unused_parameters` or `static_graph`.
        unused_here: Parameters that got no gradient on this rank in the last step.
        hook: Name of the communication hook, or None.
        forward_seconds: Time from the start of forward to the start of backward.
        backward_seconds: Time from the start of backward to its last gradient.
        exposed_seconds: Time from the last gradient until all gradients were reduced.
        communication_seconds: Time from the first bucket's launch until all gradients were reduced.
    """

    steps: int
    buckets: tuple[BucketLog, ...]
    buckets_sent: int
    rebuilt: bool
    unused: tuple[str, ...] | None
    unused_here: tuple[str, ...]
    hook: str | None
    forward_seconds: float
    backward_seconds: float
    exposed_seconds: float
    communication_seconds: float


class Reducer(Backward):
    """Averages the gradients of parameters over the ranks of a group, in buckets."""

    # After `prepare`, the next backward that gives every parameter a gradient leaves in each
    # `.grad` the sum over ranks divided by W (or what the hook made of it), with the same bits on
    # every rank.

    @runs_outside_contexts
    def __init__(
        self,
        parameters: Sequence[tuple[str, Parameter]],
        group: ProcessGroup,
        options: ReducerOptions | None = None,
    ) -> None:
        options = options or ReducerOptions()
        # with skip_unused, the bucket that carries them may be skipped
        extra_numel = 0 if options.skip_unused else len(Tally._fields)
        bucket_set = BucketSet(parameters, check_group(group), options, extra_numel=extra_numel)
        # hooks of the nodes that accumulate gradients run after all hooks of the parameters
        nodes = [accumulation_node(p) for _, p in parameters]
        self.comm_hook: StatefulHook[Any] | None = None  # as it was registered
        super().__init__(bucket_set, Usage(bucket_set.parameters, nodes, options))
        # error of a forward after a later reducer of the same parameters was used; "" without one
        self._successor, self._shared = weakref.ref[Backward](self), ""
        self._take_parameters()

    def _take_parameters(self) -> None:
        """Let this reducer, and no other one, receive the parameters' gradients."""
        nodes, reference, handles = self.usage.nodes, weakref.ref[Backward](self), []
        for i, (node, name) in enumerate(zip(nodes, self.names, strict=True)):
            earlier, known = node.metadata.get(REDUCER, (reference, name))
            other = earlier()
            if isinstance(other, Reducer) and other is not self:
                other.close()
                other._successor = reference
                other._shared = other._shared or (
                    f"parameter {known} of {other.bucket_set.options.module} is also {name} of "
                    f"{self.bucket_set.options.module}, which another wrapper has: use one "
                    "wrapper, of a module that contains both"
                )
            node.metadata[REDUCER] = reference, name
            handles.append(node.register_hook(partial(on_gradient, reference, i)))
        self._remove_hooks, self._shared = remove_hooks_with(self, handles), ""

    def _keep_parameters(self) -> None:
        """Take parameters back from a later reducer that was not used; raise if it was."""
        if not self._shared:
            return
        if (other := self._successor()) is not None and other.step:
            raise NotSupportedError(self._shared)
        self._take_parameters()

    def close(self) -> None:
        """Stop reducing."""
        self._remove_hooks()
        self.weights.clear()
        self.weights.given = None  # it would weight the gradients of another reducer

    # -- what is reduced, and how ------------------------------------------------------------

    @runs_outside_contexts
    def register_comm_hook(self, state: Any, hook: CommHook | StatefulHook[Any] | None) -> None:
        """Let `hook(state, bucket)` communicate from the next `prepare` on; None for the mean."""
        # Every rank registers the same hook. The hook is called for one bucket after the other,
        # each time once the previous future has completed, so that several collectives chained in
        # one hook run in the same order on every rank. If its attribute `single_collective` is
        # True, it is called for the next bucket without waiting. Ranks that use weights sum them
        # before the first bucket, unless the hook's attribute `linear` is True.
        self._use_hook(None if hook is None else bind_hook(state, hook))
        self.reassign_buckets([i for bucket in self.bucket_set for i in bucket.members])

    def _use_hook(self, hook: StatefulHook[Any] | None) -> None:
        if hook is not None:
            run_in_group(hook, self.group)
        self.comm_hook, self.launcher.uses_weights = hook, None
        # without a hook, the ranks' numbers travel with the gradients
        mean = hook is not None and is_mean_over(hook, self.group)
        self.launcher.hook = None if mean and self.bucket_set.can_carry_weights else hook

    @property
    def hook_state(self) -> Any:
        """State of the communication hook."""
        return None if self.comm_hook is None else self.comm_hook.state

    @property
    def buckets(self) -> list[list[str]]:
        """Names of the parameters in each bucket, in launch order."""
        return [list(bucket.names) for bucket in self.bucket_set]

    @property
    def rebuilt(self) -> bool:
        """True if buckets are final and follow the order of a backward."""
        return self.bucket_set.options.rebuilds and self.arrivals is None

    @runs_outside_contexts
    def set_layout(self, names: Sequence[Sequence[str]]) -> None:
        """Set the buckets for good, from the next `prepare` on."""
        number = {name: i for i, name in enumerate(self.names)}
        layout, params = [[number.get(n, -1) for n in bucket] for bucket in names], self.parameters
        kinds = [{(params[i].dtype, params[i].device) for i in bucket} for bucket in layout]
        if sorted(chain(*names)) != sorted(number) or any(len(kind) != 1 for kind in kinds):
            raise ArgumentError(
                f"buckets {[*map(list, names)]} do not fit the parameters {self.names}: each "
                "parameter is in one bucket, and a bucket has one dtype and device"
            )
        self.bucket_set.layout = layout
        self.reassign_buckets(self.bucket_set.first_order())

    @runs_outside_contexts
    def replace_group(self, group: ProcessGroup) -> None:
        """Reduce over another group from now on. Every rank of that group calls this."""
        hook, old = self.comm_hook, self.group
        self.set_group(check_group(group))
        if hook is not None:
            # a state that is the old group, or has it as its `process_group`, gets the new one
            if hook.state is old:
                hook.state = group
            elif getattr(hook.state, "process_group", None) is old:
                hook.state.process_group = group
        self._use_hook(hook)
        self.start_over()

    # -- before a forward --------------------------------------------------------------------

    def begin_forward(self) -> None:
        """Prepare for a forward, with or without a reduced backward: it has its own weight."""
        self._keep_parameters()
        self.detach_optimizers()
        self.weights.on_forward()

    @runs_outside_contexts
    def prepare(
        self,
        *,
        ranks: int | None = None,
        uneven: bool = False,
        shadowed: bool = False,
        recovered: bool = False,
    ) -> None:
        """Expect a backward. Called before each backward that is reduced."""
        # `recovered`: `raise_if_unfinished` was called, and nothing was sent since.
        self._keep_parameters()
        if not recovered:
            self.raise_if_unfinished()
        self.rebuild_once()
        # uneven: ranks may take part by `shadow`, where unused buckets are unknown. shadowed: some
        # ranks do, and wait for exactly one backward
        self.skip_unused = self.bucket_set.options.skip_unused and not uneven
        self.shadowed = shadowed
        self.step += 1
        self.weights.within = False
        timer = self.timer
        timer.forward_start, timer.waits = perf_counter_ns(), []
        timer.compute_start = timer.compute_end = timer.comm_start = timer.comm_end = 0
        self.transition(Event.PREPARE)
        self.prepare_buckets(ranks or self.group.size())

    def weight(self, weight: float) -> None:
        """See DistributedDataParallel.weight."""
        if self.running and torch._C._current_graph_task_id() == -1:
            self.interrupt()  # an exception ended that backward, whose weight goes with it
        self.bucket_set.finish_making()
        if self.launcher.hook is None and self.bucket_set.weights_bucket is None:
            raise NotSupportedError(NO_BUCKET)
        if self.launcher.hook is not None and not self.launcher.sums_numbers:
            raise NotSupportedError(NOT_SENT)
        if self.awaits_finalization:
            raise ReductionError("weight(n) before finalize_backward(): finalize first")
        if self.state is BackwardState.SHORT and self.launcher.launched:
            raise ReductionError(
                "weight(n) between two backwards of one forward: give it before the first of them"
            )
        self.weights.give(weight)

    # -- after a forward ---------------------------------------------------------------------

    def expect(
        self, outputs: Iterable[Tensor], *, counted: bool = True, nested: bool = False
    ) -> None:
        """Let a backward begin at these outputs of a forward, each time it is run."""
        # Without this call a backward begins at the first gradient of a parameter. If that comes
        # from a reentrant checkpoint, unused parameters are not known then.
        begun = [t for t in outputs if t.requires_grad and t.grad_fn is not None]
        if not begun:
            return
        # `nested`: the forward ran within the reduced backward, and nothing was prepared for it. A
        # non-reentrant checkpoint needs only the saved tensors. A reentrant one runs a backward
        # through these outputs, which ends the running backward and is reduced instead.
        # ranks may run different numbers of forwards that are not counted, such as evaluations
        forward = self.forwards.begin() if counted else None
        number = forward.number if forward else 0
        call = partial(on_output, weakref.ref(self), forward=number, nested=nested)
        for tensor in begun:
            tensor.register_hook(call)
            if forward is not None:  # the node references it for as long as the node lives
                node: Any = tensor.grad_fn
                node.metadata[OUTPUT] = forward

    def expect_local(self, outputs: Iterable[Tensor]) -> None:
        """Record the outputs of a forward under `no_sync`, whose backward is not reduced."""
        constant = True
        for tensor in outputs:
            if tensor.requires_grad:
                constant = False
                if tensor.grad_fn is not None:
                    tensor.register_hook(partial(on_local_output, weakref.ref(self), self.step))
        if constant:  # it cannot have a backward: its gradients are zero
            self.weights.count()

    def skip(self, *, reduce: bool) -> None:
        """Expect no backward of the last forward; all ranks may `reduce` earlier gradients."""
        self.weights.skip()
        if self.state is BackwardState.EXPECTED:
            self.transition(Event.SKIP)
        if reduce:
            self.prepare()
            self.reduce_accumulated()
        self.weights.given = None

    @property
    def in_backward(self) -> bool:
        """True within the backward that is reduced: in a checkpoint or a hook."""
        # it may not have reached the outputs yet if a checkpoint contains more than the module
        begun = self.running or self.state is BackwardState.EXPECTED
        return begun and torch._C._current_graph_task_id() != -1

    def logging_data(self) -> LoggingData:
        """Return buckets, unused parameters and times of the last step that reduced gradients."""
        usage, timer, hook = self.usage, self.timer, self.comm_hook
        unused = None
        if usage.find_unused or usage.static:
            unused = tuple(self.names[i] for i in sorted(usage.unused))
        waits = zip(self.bucket_set, chain(timer.waits, repeat(0)), strict=False)

        def seconds(start: int, end: int) -> float:  # 0 for a phase that has not ended
            return max(0, end - start) / 1e9

        return LoggingData(
            steps=self.step,
            buckets=tuple(
                BucketLog(tuple(b.names), sum(p.nbytes for p in b.parameters), wait / 1e9)
                for b, wait in waits
            ),
            buckets_sent=timer.sent,
            rebuilt=self.rebuilt,
            unused=unused,
            unused_here=timer.unused_here,
            hook=None if hook is None else hook_name(hook),
            forward_seconds=seconds(timer.forward_start, timer.compute_start),
            backward_seconds=seconds(timer.compute_start, timer.compute_end),
            exposed_seconds=seconds(timer.compute_end, timer.comm_end),
            communication_seconds=seconds(timer.comm_start, timer.comm_end),
        )

    # -- PyTorch's names ---------------------------------------------------------------------

    def prepare_for_backward(self, outputs: Iterable[Tensor]) -> None:
        """Call `prepare`, then `expect` with these tensors: a loss, or a forward's outputs."""
        # The name is that in PyTorch's reducer. Programs call it if several forwards under
        # `no_sync` have one backward that is reduced, or if one forward has several backwards.
        self.prepare()
        self.expect(outputs)

    def _rebuild_buckets(self) -> bool:
        """Return False: `prepare` rebuilds buckets. Accepted for compatibility with PyTorch."""
        return False

    def _delay_all_reduce(self) -> None:
        """Do nothing: a static graph's first backward is reduced at its end. See PyTorch."""


# -- hooks of outputs ----------------------------------------------------------------------------
# They hold weak references, so that a graph does not keep the reducer alive.


@runs_outside_contexts
def on_output(
    reference: weakref.ref[Reducer], _: Tensor, forward: int = 0, *, nested: bool = False
) -> None:
    """Begin a backward at an output of a forward, which may be nested in another backward."""
    if (reducer := reference()) is not None:
        reducer._keep_parameters()
        if nested and reducer.running and torch._C._current_graph_task_id() != reducer.task:
            reducer.prepare()
        reducer.reach_output(forward)


@runs_outside_contexts
def on_local_output(reference: weakref.ref[Backward], step: int, _: Tensor) -> None:
    """Begin the backward of a forward under `no_sync`, and count its weight."""
    backward = reference()
    if backward is None:
        return
    backward.weights.on_backward()
    # `step` is the last step prepared before the forward: a program may also prepare the backward
    # of this forward by hand
    if not backward.running and (
        backward.state is not BackwardState.SHORT and backward.step == step
    ):
        local = _LocalBackward(backward)
        torch.autograd.Variable._execution_engine.queue_callback(local)


class _LocalBackward:
    """Count a running backward of a forward under `no_sync` for as long as autograd keeps this."""

    def __init__(self, backward: Backward) -> None:
        self._backward = backward
        backward.local_running += 1

    def __call__(self) -> None:
        """Do nothing: autograd then drops this object, as it does after an exception."""

    def __del__(self) -> None:
        self._backward.local_running -= 1
        self._backward.local_arrivals.clear()


# -- outputs of a forward, at which a backward begins --------------------------------------------

OUTPUT = "gradwire.ddp.output"
"""Key in an output's node of autograd: its forward."""


def beginnings(output: Any, since: int) -> Iterator[Tensor]:
    """Yield the tensors at which a backward through a forward's output may begin."""
    # `since` is autograd's sequence number when the forward began.
    seen: set[int] = set()
    for leaf in leaves(output):
        if isinstance(leaf, Tensor):
            yield leaf
            # A view that is written in place (the result of `squeeze`, by `out += 1`) gets a new
            # node, without its hooks. Backward then reaches the base of the view.
            base = leaf._base if leaf.requires_grad else None
            other: Iterable[Tensor] = () if base is None else (base,)
        else:
            own = object.__getattribute__(leaf, "__dict__") if may_hold(leaf) else {}
            other = in_attributes(own, seen)
        for tensor in other:  # of this forward only: an object may also hold older tensors
            if tensor.grad_fn is not None and tensor.grad_fn._sequence_nr() >= since:
                yield tensor


def with_own_nodes(output: Any, since: int) -> Any:
    """Return a forward's output, with views instead of tensors that it passed through."""
    # Such a tensor is an input of the forward, or an output of an inner module. A backward reaches
    # the outputs of several modules in the same order on every rank only if each output has a node
    # made by its forward, even on ranks whose forward does nothing. `since` is autograd's sequence
    # number when the forward began.

    def is_other(t: Tensor) -> bool:
        if not t.requires_grad or t.layout != torch.strided:
            return False
        node: Any = t.grad_fn  # whose `metadata` is a method in PyTorch's stub
        return node is None or node._sequence_nr() < since or OUTPUT in node.metadata

    if not any(is_other(t) for t in tensors_in(output)):
        return output
    return map_tensors(lambda t: t.view_as(t) if is_other(t) else t, output)
