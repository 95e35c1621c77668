"""Reducer: averages gradients over ranks while backward is still computing others.

Each parameter reports once per backward that its gradient is ready. When all parameters of a bucket
have done so, the bucket is launched, in the same order on every rank. At the end of backward, the
reducer waits for the buckets in that order and writes the results to the gradients (see
`finalize`). `average_gradients` in `naive.py` computes the same without buckets or overlap.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from gradwire._groups import check_group
from gradwire._scope import runs_outside_contexts
from gradwire.ddp.buckets.assignment import BucketAssigner
from gradwire.ddp.faults.protocol import BackwardState, Event
from gradwire.ddp.hook_handles import remove_hooks_with
from gradwire.ddp.options import ReducerOptions
from gradwire.ddp.reducer.arrival import expect, expect_local, expect_nested, on_gradient
from gradwire.ddp.reducer.backward import Backward
from gradwire.ddp.reducer.bookkeeping import ReplicaSums
from gradwire.ddp.reducer.bypasses import has_new_hooks
from gradwire.ddp.reducer.finalize import finalize_manually, shadow
from gradwire.ddp.reducer.launch_order import check_over
from gradwire.ddp.reducer.log import LoggingData
from gradwire.ddp.reducer.tally import Tally
from gradwire.ddp.reducer.usage import Usage, accumulation_node
from gradwire.ddp.reducer.weights import NO_WEIGHTS_BUCKET
from gradwire.errors import ArgumentError, NotSupportedError, ReductionError
from gradwire.hooks import CommHook, StatefulHook, bind_hook, hook_name, run_in_group

REDUCER = "gradwire.ddp.reducer"
"""Key in a parameter's node of autograd: the parameter's reducer, and its name there."""


def check_unshared(named: Sequence[tuple[str, Tensor]], module: str) -> None:
    """Raise if another reducer has one of the parameters, of a module of this name."""

    def shared() -> str | None:
        for name, parameter in named:
            reference, known = accumulation_node(parameter).metadata.get(REDUCER, (None, ""))
            other: Reducer | None = reference and reference()
            if other is not None and other._remove_hooks.alive:
                return f"{name} of {module} is also {known} of {other._module}"
        return None

    if shared() is not None:
        gc.collect()  # a deleted wrapper may be part of a reference cycle
    if (found := shared()) is not None:
        raise NotSupportedError(
            f"parameter {found}, which has a wrapper: wrap one module that contains both, or "
            "modules without common parameters; to wrap a module again, delete its first wrapper"
        )


class Reducer:
    """Averages the gradients of parameters over the ranks of a group, in buckets.

    After `prepare`, the next backward that gives every parameter a gradient leaves in each
    `.grad` the sum over ranks divided by W (or what the hook made of it), with the same bits on
    every rank.

    Args:
        parameters: Names and parameters that require a gradient; the same on every rank.
        group: Process group.
        options: Options.
        given: Fields of `ReducerOptions`, such as `caps`, instead of `options`.

    Raises:
        ArgumentError: There are no parameters, caps are not positive, or the layout does not fit.
        ArgumentTypeError: `group` is no process group.
        NotSupportedError: Another reducer has one of the parameters.

    Example:
        >>> import torch.distributed as dist
        >>> from gradwire.testing import run_ranks
        >>> def main():
        ...     weight = torch.nn.Parameter(torch.zeros(2))
        ...     reducer = Reducer([("weight", weight)], dist.group.WORLD)
        ...     reducer.prepare()
        ...     (weight * (dist.get_rank() + 1)).sum().backward()
        ...     return weight.grad.tolist()
        >>> run_ranks(main, world_size=2)  # (1 + 2) / 2
        [[1.5, 1.5], [1.5, 1.5]]
    """

    @runs_outside_contexts
    def __init__(
        self,
        parameters: Sequence[tuple[str, Parameter]],
        group: ProcessGroup,
        options: ReducerOptions | None = None,
        **given: Any,
    ) -> None:
        check_group(group)
        if not parameters:
            raise ArgumentError("parameters is empty: there is nothing to reduce")
        options = ReducerOptions(**given) if options is None else options
        check_unshared(parameters, options.module)
        self._module = options.module
        # with skip_unused, the bucket that carries them may be skipped
        extra_numel = 0 if options.skip_unused else len(Tally._fields)
        assigner = BucketAssigner(parameters, group, options, extra_numel=extra_numel)
        # hooks of the nodes that accumulate gradients run after all hooks of the parameters
        nodes = [accumulation_node(p) for _, p in parameters]
        self._backward = Backward(assigner, Usage(assigner.parameters, nodes, options))
        self._remove_hooks = self._register_hooks(nodes)
        for node, (name, _) in zip(nodes, parameters, strict=True):
            node.metadata[REDUCER] = weakref.ref(self), name

    def _register_hooks(self, nodes: Sequence[Any]) -> weakref.finalize[Any, Any]:
        """Register the hooks for ready gradients, and return a finalizer that removes them."""
        reference = weakref.ref(self._backward)
        handles = [
            node.register_hook(partial(on_gradient, reference, i)) for i, node in enumerate(nodes)
        ]
        return remove_hooks_with(self, handles)

    @runs_outside_contexts
    def register_comm_hook(self, state: Any, hook: CommHook | StatefulHook[Any] | None) -> None:
        """Let `hook(state, bucket)` communicate from the next `prepare` on; None for the mean.

        Every rank registers the same hook. The hook is called for one bucket after the other, each
        time once the previous future has completed, so that several collectives chained in one hook
        run in the same order on every rank. If its attribute `single_collective` is True, it is
        called for the next bucket without waiting. Ranks sum their weights before the first bucket,
        unless the hook's attribute `linear` is True.

        Raises:
            ArgumentTypeError: Not a hook.
            ArgumentError: A `StatefulHook` together with another state.
        """
        backward = self._backward
        bound = None if hook is None else bind_hook(state, hook)
        if bound is not None:
            run_in_group(bound, backward.group)
        backward.launcher.hook = bound
        order = [i for bucket in backward.buckets for i in bucket.members]
        backward.reassign_buckets(order)

    def reword_unexpected(self, reword: Callable[[ReductionError], ReductionError | None]) -> None:
        """Let a function convert errors of unexpected gradients; None from it keeps the error."""
        self._backward.reword = reword

    @property
    def has_hook(self) -> bool:
        """True if a communication hook is registered."""
        return self._backward.launcher.hook is not None

    @property
    def hook_state(self) -> Any:
        """State of the communication hook."""
        return self._backward.launcher.state

    @property
    def buckets(self) -> list[list[str]]:
        """Names of the parameters in each bucket, in launch order."""
        return [list(bucket.names) for bucket in self._backward.buckets]

    @property
    def rebuilt(self) -> bool:
        """True if buckets are final and follow the order of a backward."""
        return self._backward.order.rebuilt and self._backward.order.arrivals is None

    @runs_outside_contexts
    def set_layout(self, names: Sequence[Sequence[str]]) -> None:
        """Set the buckets for good, from the next `prepare` on.

        Raises:
            ArgumentError: The names do not match the parameters.
        """
        assigner = self._backward.assigner
        number = {name: i for i, name in enumerate(assigner.names)}
        flat = [name for bucket in names for name in bucket]
        layout = [[number[n] for n in bucket if n in number] for bucket in names]
        params = assigner.parameters
        kinds = [{(params[i].dtype, params[i].device) for i in bucket} for bucket in layout]
        if sorted(flat) != sorted(number) or any(len(kind) != 1 for kind in kinds):
            raise ArgumentError(
                f"buckets {[*map(list, names)]} do not fit the parameters {assigner.names}: each "
                "parameter is in one bucket, and a bucket has one dtype and device"
            )
        assigner.layout = layout
        self._backward.reassign_buckets(assigner.first_order())

    @runs_outside_contexts
    def prepare(
        self,
        *,
        ranks: int | None = None,
        uneven: bool = False,
        shadowed: bool = False,
        recovered: bool = False,
    ) -> None:
        """Expect a backward. Called before each backward that is reduced.

        Args:
            ranks: Divisor of the sum; None for the number of ranks of the group.
            uneven: If True, ranks may take part by `shadow`, where unused buckets are unknown.
            shadowed: If True, some ranks do. They wait for exactly one backward.
            recovered: True if `recover` was called, and nothing was sent since.

        Raises:
            ReductionError: The previous backward left parameters without a gradient.
            PeerFailedError: Another rank reported an error.
            BrokenGroupError: The group cannot be used again after an earlier error.
        """
        backward = self._backward
        if not recovered:
            backward.raise_if_unfinished()
        if not backward.step:  # optimizers may be attached after wrapping, without hooks
            backward.detach_optimizers()
        backward.rebuild_once()
        ranks = ranks or backward.group.size()
        backward.prepare_for_backward(ranks, uneven=uneven, shadowed=shadowed)

    def weight(self, weight: float) -> None:
        """See DistributedDataParallel.weight."""
        backward = self._backward
        backward.buckets.finish_making()
        if not self.has_hook and backward.buckets.weights_bucket is None:
            raise NotSupportedError(NO_WEIGHTS_BUCKET)
        if backward.awaits_finalization:
            raise ReductionError("weight(n) before finalize_backward(): finalize first")
        if backward.state is BackwardState.SHORT and backward.launcher.launched:
            raise ReductionError(
                "weight(n) between two backwards of one forward: give it before the first of them"
            )
        backward.weights.give(weight)

    @property
    def group(self) -> ProcessGroup:
        """Process group."""
        return self._backward.group

    @property
    def replica_sums(self) -> ReplicaSums:
        """Sums that compare replicas, sent at the end of backwards."""
        return self._backward.replicas

    @property
    def step(self) -> int:
        """Number of backwards prepared."""
        return self._backward.step

    def begin_forward(self) -> None:
        """Prepare for a forward, with or without a reduced backward: it has its own weight."""
        if has_new_hooks():
            self._backward.detach_optimizers()
        self._backward.weights.on_forward()

    def recover(self) -> None:
        """Raise errors of the previous backward, before ranks communicate: the start of `prepare`.

        Raises:
            ReductionError: The previous backward left parameters without a gradient.
            PeerFailedError: Another rank reported an error.
            BrokenGroupError: The group cannot be used again after an earlier error.
        """
        self._backward.raise_if_unfinished()

    def check_over(self) -> None:
        """Raise if a rank waits for a backward in `shadow`. Called before other communication.

        Raises:
            ReductionError: A rank waits, because a forward had no backward on this rank.
        """
        check_over(self._backward)

    @property
    def shadowed(self) -> bool:
        """True if a rank takes part by `shadow`, and waits for a backward."""
        return self._backward.shadowed

    def end_uneven(self) -> None:
        """Record that no rank takes part by `shadow` from now on."""
        self._backward.shadowed = False

    def expect(self, outputs: Iterable[Tensor], *, counted: bool = True) -> None:
        """Let a backward begin at these outputs of a forward, each time it is run.

        Ranks may run different numbers of forwards that are not `counted`, such as evaluations.

        Without this call a backward begins at the first gradient of a parameter. If that comes from
        a reentrant checkpoint, unused parameters are not known then.
        """
        expect(self._backward, outputs, counted=counted)

    def expect_local(self, outputs: Iterable[Tensor]) -> None:
        """Record the outputs of a forward under `no_sync`, whose backward is not reduced."""
        expect_local(self._backward, outputs)

    def expect_after_transform(self, *, local: bool) -> None:
        """Prepare late for a forward in a transform of `torch.func`.

        Its results usually have no backward. The backward is prepared when it begins.

        Args:
            local: If True, that backward is not reduced.
        """
        self._backward.weights.on_forward()
        self._backward.prepare_late = None if local else weakref.WeakMethod(self.prepare)

    def skip(self) -> None:
        """Expect no backward of the last forward, which all ranks leave out."""
        backward = self._backward
        backward.prepare_late = backward.weights.given = None
        if backward.state is BackwardState.EXPECTED:
            backward.transition(Event.SKIP)

    @property
    def in_backward(self) -> bool:
        """True within the backward that is reduced: in a checkpoint or a hook.

        The backward may not have reached the outputs yet if a checkpoint contains more than the
        module.
        """
        begun = self._backward.running or self._backward.state is BackwardState.EXPECTED
        return begun and torch._C._current_graph_task_id() != -1

    def expect_nested(self, outputs: Iterable[Tensor]) -> None:
        """Let a backward begin at the outputs of a forward that ran within the reduced backward.

        Nothing was prepared for that forward. A non-reentrant checkpoint needs only the saved
        tensors. A reentrant one runs a backward through these outputs, which ends the running
        backward and is reduced instead.
        """
        expect_nested(self._backward, outputs, self.prepare)

    def prepare_for_backward(self, outputs: Iterable[Tensor]) -> None:
        """Call `prepare`, then `expect` with these tensors: a loss, or a forward's outputs.

        The name is that in PyTorch's reducer. Programs call it if several forwards under `no_sync`
        have one backward that is reduced, or if one forward has several backwards.
        """
        self.prepare()
        self.expect(outputs)

    def _rebuild_buckets(self) -> bool:
        """Return False: `prepare` rebuilds buckets. Accepted for compatibility with PyTorch."""
        return False

    def _delay_all_reduce(self) -> None:
        """Do nothing: a static graph's first backward is reduced at its end. See PyTorch."""

    @property
    def manual_finalization(self) -> bool:
        """True if `finalize` ends a backward, False if it ends by itself."""
        return self._backward.manual

    @manual_finalization.setter
    def manual_finalization(self, required: bool) -> None:
        if required != self._backward.manual and self._backward.state.unfinished:
            raise ReductionError(
                "manual finalization was switched during a backward: set it before a forward, or "
                "after finalize_backward()"
            )
        self._backward.manual = required

    @property
    def must_return_first(self) -> bool:
        """True if the next backward must return before `finalize` is called."""
        backward = self._backward
        return backward.manual and (backward.order.arrivals is not None or backward.usage.recording)

    @runs_outside_contexts
    def finalize(self) -> None:
        """End a backward with `manual_finalization`, after it or in one of its hooks.

        Raises:
            ReductionError: Finalization is not manual, nothing was reduced, or gradients are
                missing.
            PeerFailedError: Another rank reported an error.
        """
        finalize_manually(self._backward)

    @runs_outside_contexts
    def shadow(self) -> None:
        """Take part in the other ranks' backward with zero gradients, after `prepare`."""
        shadow(self._backward)

    @runs_outside_contexts
    def replace_group(self, group: ProcessGroup) -> None:
        """Reduce over another group from now on. Every rank of that group calls this.

        If the hook's state, or its `process_group`, is the old group, the new one replaces it.
        """
        backward, old = self._backward, self._backward.assigner.group
        hook = backward.launcher.hook
        backward.set_group(check_group(group))
        backward.launcher.hook = hook
        if hook is not None:
            if hook.state is old:
                hook.state = group
            elif getattr(hook.state, "process_group", None) is old:
                hook.state.process_group = group
            run_in_group(hook, group)
        backward.start_over()

    def close(self) -> None:
        """Stop reducing, so that another reducer can take the parameters."""
        self._remove_hooks()

    def logging_data(self) -> LoggingData:
        """Return buckets, unused parameters and times of the last step that reduced gradients."""
        backward, usage = self._backward, self._backward.usage
        unused = None
        if usage.find_unused or usage.static:
            unused = tuple(backward.names[i] for i in sorted(usage.unused))
        hook = backward.launcher.hook
        return LoggingData(
            steps=backward.step,
            buckets=backward.timer.buckets(backward.buckets),
            buckets_sent=backward.timer.sent,
            rebuilt=self.rebuilt,
            unused=unused,
            unused_here=backward.timer.unused_here,
            hook=None if hook is None else hook_name(hook),
            **backward.timer.seconds(),
        )
