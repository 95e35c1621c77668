"""Reducer: averages gradients over ranks while backward still computes others.

Each parameter reports once per backward that its gradient is ready. A bucket whose parameters all
have is launched, in the same order on every rank; when backward ends, the buckets are waited for
in that order and their values put back. `average_gradients` in `_naive.py` is the same without
buckets or overlap.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Sequence
from functools import partial
from time import perf_counter_ns
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from gradwire.ddp._bucket import Bucket
from gradwire.ddp._bucket_set import BucketSet
from gradwire.ddp._flight import Flight, Launched
from gradwire.ddp._group import check_group
from gradwire.ddp._hook_state import Part, replace_group
from gradwire.ddp._in_backward import step_and_clear, take_over
from gradwire.ddp._launch import Launcher
from gradwire.ddp._log import Clock, LoggingData
from gradwire.ddp._planning import BucketLayout, Planner, check_layout
from gradwire.ddp._recovery import Recovery
from gradwire.ddp._usage import Usage
from gradwire.errors import ArgumentError, NotSupportedError, ReductionError
from gradwire.gradients import CommHook, check_hook, name_of

__all__ = ["Reducer"]


class Reducer:
    """Averages the gradients of parameters over the ranks of a group, in buckets.

    After `prepare`, the next backward that gives every parameter a gradient leaves in each
    `.grad` the sum over ranks divided by W (or what the hook made of it), with the same bits on
    every rank.

    Args:
        parameters: Names and parameters, with `requires_grad`; the same on every rank.
        group: The process group.
        caps: Bytes: the size limits of the first bucket, the second, …; the last one repeats.
            None means 25 MiB, after a first bucket of 1 MiB that starts communication early; on
            the CPU, where one message more costs more than an early start gains, that one is left
            out unless a hook is registered.
        gradient_as_bucket_view: Let gradients be views of their bucket: less memory, one copy
            less. `detach_()` on them is then an error.
        find_unused_parameters: Parameters may be left out of a backward, on some ranks or on all.
        static_graph: Every backward uses the same parameters, equally often, as the first one.
        skip_unused: Send nothing for buckets that are unused, which is then so on every rank.
        sparse: Names of the parameters whose gradients are sparse.
        last: Names of parameters that travel together, after all others.
        bucket_layout: From the parameters to the names in each bucket, in the order of launch;
            the same on every rank. Buckets are then not planned, nor rebuilt.

    Raises:
        ArgumentError: There are no parameters, caps are not positive, or the layout does not fit.
        ArgumentTypeError: `group` is no process group.

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

    def __init__(
        self,
        parameters: Sequence[tuple[str, Parameter]],
        group: ProcessGroup,
        *,
        caps: Sequence[int] | None = None,
        gradient_as_bucket_view: bool = False,
        find_unused_parameters: bool = False,
        static_graph: bool = False,
        skip_unused: bool = False,
        sparse: Collection[str] = (),
        last: Collection[str] = (),
        bucket_layout: BucketLayout | None = None,
    ) -> None:
        self._group = check_group(group)
        if not parameters:
            raise ArgumentError("parameters is empty: there is nothing to reduce")
        self._names = [name for name, _ in parameters]
        self._parameters = [p for _, p in parameters]
        self._skip_unused = skip_unused
        self._planner = Planner(
            self._names,
            self._parameters,
            group,
            caps=None if caps is None else list(caps),
            keep=gradient_as_bucket_view,
            sparse={i for i, name in enumerate(self._names) if name in sparse},
            last={i for i, name in enumerate(self._names) if name in last},
            layout=check_layout(bucket_layout, parameters),
        )
        # the nodes that accumulate gradients: their hooks run after all hooks of the parameters
        self._nodes = [torch.autograd.graph.get_gradient_edge(p).node for p in self._parameters]
        self._usage = Usage(self._nodes, find_unused=find_unused_parameters, static=static_graph)
        self._connect()
        self._buckets = BucketSet(self._planner)
        self._armed = self._repeated = self._callback_queued = False
        self._ended_short = self._reduced_once = self._may_repeat = False
        self._clock = Clock()
        self._unused_here: tuple[str, ...] = ()
        self._optimized: list[Parameter] = []
        self._order: list[int] | None = []
        self._make_buckets(self._planner.first_order())
        handles = [
            node.register_hook(partial(_on_gradient, weakref.ref(self), i))
            for i, node in enumerate(self._nodes)
        ]
        self._hooks = weakref.finalize(self, _remove, handles)
        self._hooks.atexit = False

    def register_comm_hook(self, state: Any, hook: CommHook | None) -> None:
        """Let `hook(state, bucket)` communicate from the next `prepare` on; None: the mean.

        Every rank registers the same hook. Hooks are called one at a time in bucket order, the
        next when the last one's future has completed, so that several collectives chained in one
        hook run in the same order on every rank; a hook with a true attribute
        `single_collective` is called for the next bucket without waiting.

        Raises:
            ArgumentTypeError: Not a hook.
        """
        self._launcher.hook = None if hook is None else check_hook(hook)
        self._launcher.state = state
        self._plan_anew([i for b in self._buckets for i in b.members])

    @property
    def buckets(self) -> list[list[str]]:
        """The names of the parameters in each bucket, in the order of launch."""
        return [list(bucket.names) for bucket in self._buckets]

    def prepare(self, *, ranks: int | None = None) -> None:
        """Expect a backward: to be called before each one that is to be reduced.

        Args:
            ranks: How many ranks the sum is divided by; None: those of the group.

        Raises:
            ReductionError: The backward before left parameters without a gradient.
            PeerFailedError: Another rank reported an error.
            BrokenGroupError: The group cannot be used again after an earlier error.
        """
        self._recovery.raise_waiting()
        if self._armed and (self._callback_queued or not self._buckets.untouched):
            self._end_unfinished()
        if not self._flight.step:
            self._optimized = take_over(self._parameters)
        if self._order is not None and self._reduced_once:
            self._rebuild(self._order)
            self._recovery.raise_waiting()  # told while waiting for the order
        self._flight.step += 1
        self._clock.start()
        self._arm()
        self._divide_by(ranks or self._group.size())

    def _arm(self) -> None:
        self._armed = self._may_repeat = True
        if self._usage.recording:
            self._buckets.defer(until_the_end=True)

    def _divide_by(self, ranks: int) -> None:
        ratio = self._group.size() / ranks
        self._launcher.correction = ratio
        if ratio != 1.0 and self._launcher.hook is None:
            for bucket in self._buckets:
                bucket.scale *= ratio

    def expect(self, outputs: Iterable[Tensor]) -> None:
        """The backward begins at these outputs of a forward, each time it is run.

        Without this it begins at the first gradient of a parameter; and where that comes from a
        reentrant checkpoint, what is unused cannot be told.
        """
        for tensor in outputs:
            if tensor.requires_grad and tensor.grad_fn is not None:
                tensor.register_hook(partial(_on_output, weakref.ref(self)))

    def shadow(self) -> None:
        """Take part in the other ranks' backward with zeros, after `prepare`."""
        with torch.no_grad():
            for number, bucket in enumerate(self._buckets, 1):
                if self._flight.launched and self._launcher.one_at_a_time:
                    self._launcher.result(self._flight.launched[-1])
                bucket.blank()
                self._launcher.launch(bucket, is_last=number == len(self._buckets))
            if self._usage.tolerant:
                self._exchange_usage(())
            for launched in self._flight.launched:
                self._launcher.result(launched)
            if self._launcher.hook is not None:
                self._recovery.vote()
        self._reduced_once = True
        if self._usage.recording:
            self._usage.record(range(len(self._parameters)))
        self._reset()

    def replace_group(self, group: ProcessGroup) -> None:
        """Reduce over another group from now on: every rank of it calls.

        A hook's state that is the old group, or has it as its `process_group`, gets the new one.
        """
        old, self._group = self._group, check_group(group)
        hook, state = self._launcher.hook, replace_group(self._launcher.state, old, group)
        self._planner.group = group
        self._connect()
        self._launcher.hook, self._launcher.state = hook, state
        self._start_over()

    def _connect(self) -> None:
        """What depends on the group."""
        self._flight = Flight(self._group)
        self._recovery = Recovery(self._group, self._flight, self._reset, self._start_over)
        self._launcher = Launcher(self._group, self._flight, self._recovery)

    def close(self) -> None:
        """Reduce nothing from now on: the parameters are free for another reducer."""
        self._hooks()

    @property
    def has_hook(self) -> bool:
        """Whether a hook communicates."""
        return self._launcher.hook is not None

    @property
    def hook_state(self) -> Any:
        """The hook's state."""
        return self._launcher.state

    def logging_data(self) -> LoggingData:
        """Buckets, unused parameters and times, as of the last step that reduced gradients."""
        hook, asked = self._launcher.hook, self._usage.find_unused or self._usage.static
        return LoggingData(
            steps=self._flight.step,
            buckets=self._clock.buckets(self._buckets),
            buckets_sent=self._clock.sent,
            rebuilt=self._order is None,
            unused=tuple(self._names[i] for i in sorted(self._usage.unused)) if asked else None,
            unused_here=self._unused_here,
            hook=None if hook is None else name_of(hook),
            **self._clock.seconds(),
        )

    @property
    def layout(self) -> list[list[Part]]:
        """The buckets' parameters, with their sizes."""
        return self._buckets.layout

    def set_layout(self, names: Sequence[Sequence[str]]) -> None:
        """Make the buckets so, from the next `prepare` on, and let them stay.

        Raises:
            ArgumentError: The names are not those of the parameters.
        """
        named = list(zip(self._names, self._parameters, strict=True))
        self._planner.layout = check_layout(lambda _: names, named)
        self._plan_anew(self._planner.first_order())

    # -- buckets ---------------------------------------------------------------------------

    def _plan_anew(self, order: Sequence[int]) -> None:
        """Buckets for parameters that become ready in this order, until it is known better."""
        self._order, self._reduced_once, self._armed = [], False, False
        self._make_buckets(order)

    def _make_buckets(self, order: Sequence[int]) -> None:
        self._planner.counts = self._usage.counts
        launcher = self._launcher
        self._buckets.make(order, with_hook=launcher.hook is not None, state=launcher.state)

    def _rebuild(self, order: Sequence[int]) -> None:
        """Makes the buckets anew in the order in which rank 0's gradients became ready."""
        agreed = self._launcher.agree([*dict.fromkeys([*order, *self._planner.first_order()])])
        self._reset()
        self._order = None
        never = self._usage.unused if self._usage.static else frozenset()
        self._make_buckets([i for i in agreed if i not in never])

    # -- backward --------------------------------------------------------------------------

    def _begin(self) -> None:
        """The first gradient of a backward, or that of an output, is there."""
        engine = torch.autograd.Variable._execution_engine
        engine.queue_callback(self._on_backward_end)
        self._callback_queued = True
        self._clock.backward = self._clock.backward or perf_counter_ns()
        if torch.is_grad_enabled():
            self._buckets.defer(with_graph=True)
        if self._usage.find_unused:
            self._buckets.leave_out(self._usage.absent())

    def _on_full(self, bucket: Bucket) -> None:
        if surplus := bucket.surplus():
            self._recovery.fail(
                ReductionError(
                    f"parameters {surplus} got a gradient twice in one backward, or one that was "
                    "not expected: they are used in several reentrant checkpoints (use "
                    "use_reentrant=False, or static_graph=True), or with static_graph=True the "
                    "graph is another than in the first backward",
                    surplus,
                )
            )
        with torch.no_grad():
            self._launch_in_order(wait=False)

    def _launch_in_order(self, *, wait: bool) -> None:
        """Launches every full bucket whose predecessors have been launched."""
        launched = self._flight.launched
        while len(launched) < len(self._buckets):
            bucket = self._buckets[len(launched)]
            if not bucket.full:
                return
            if launched and (future := launched[-1].future) and self._launcher.one_at_a_time:
                if not (wait or future.done()):
                    return
                self._launcher.result(launched[-1])
            if self._skip_unused and len(bucket.absent) == len(bucket.members):
                launched.append(Launched(bucket))
                continue
            self._launcher.gather(bucket)
            self._clock.launch = self._clock.launch or perf_counter_ns()
            self._launcher.launch(bucket, is_last=len(launched) + 1 == len(self._buckets))

    def _on_backward_end(self) -> None:
        self._callback_queued = False
        if not self._armed:
            return
        if self._buckets.untouched:  # gradients of other things than parameters
            self._buckets.reset()
            if self._repeated:
                self._armed = False
            else:
                self._arm()
            return
        self._clock.computed = perf_counter_ns()
        with torch.no_grad():
            self._leave_out_missing()
            self._launch_in_order(wait=True)
            if len(self._flight.launched) < len(self._buckets):
                self._ended_short = True  # another backward may bring the rest
                return
            self._finish()

    def _leave_out_missing(self) -> None:
        """What did not come, and was free not to, is absent."""
        if self._usage.recording:
            self._buckets.complete()
        elif missing := self._buckets.missing():
            needed = (i for i in missing if self._parameters[i].requires_grad)
            if self._usage.find_unused or not any(True for _ in needed):
                self._buckets.leave_out(missing)

    def _finish(self) -> None:
        """Waits for the buckets and hands the gradients what came back."""
        absent = self._buckets.absent()
        untouched = {i for i in absent if not self._parameters[i].requires_grad}
        if self._usage.tolerant:
            self._exchange_usage(self._buckets.arrived())
            untouched |= self._usage.unused
        results = []
        for launched in self._flight.launched:
            since = perf_counter_ns()
            results.append(self._launcher.result(launched))
            self._clock.waits.append(perf_counter_ns() - since)
        if self._launcher.hook is not None:
            self._recovery.vote()  # gradients change on all ranks or on none
        for launched, reduced in zip(self._flight.launched, results, strict=True):
            launched.bucket.scatter(reduced, untouched)
        step_and_clear(self._optimized)
        self._reduced_once = True
        self._clock.sent = self._flight.sent
        self._unused_here = tuple(self._names[i] for i in sorted(absent))
        self._clock.finished = perf_counter_ns()
        if self._usage.recording:
            self._usage.record(self._buckets.arrived())
        self._reset()

    def _exchange_usage(self, used: Iterable[int]) -> None:
        self._usage.receive(self._launcher.add_up(self._usage.flags(used)))

    # -- the state between backwards -------------------------------------------------------

    def _end_unfinished(self) -> None:
        """The backward before did not end: say why, or bring the other ranks out of it."""
        if all(bucket.full for bucket in self._buckets):
            self._on_backward_end()  # interrupted after the last gradient: nothing is lacking
            return
        if not self._ended_short:
            self._recovery.interrupted()
            return
        lacking = [self._names[i] for i in sorted(self._buckets.missing())]
        self._recovery.fail(
            ReductionError(
                f"parameters {lacking} got no gradient in the backward before, so that nothing "
                "was reduced: make every output of the module take part in the loss, set "
                "find_unused_parameters=True, or requires_grad=False on those parameters",
                lacking,
            )
        )

    def _reset(self) -> None:
        """Ready for the next `prepare`."""
        self._armed = self._repeated = self._ended_short = self._callback_queued = False
        self._flight.clear()
        if self._order is not None and not self._reduced_once:
            self._order.clear()
        self._buckets.reset()

    def _start_over(self) -> None:
        """As after construction: ranks may have been at different bucket plans."""
        self._reset()
        self._usage.forget()
        self._plan_anew(self._planner.first_order())


def _on_output(reference: weakref.ref[Reducer], _: Tensor) -> None:
    """A backward begins at an output: the first after its forward, or another one."""
    reducer = reference()
    if reducer is None or reducer._callback_queued:
        return
    if not reducer._armed:
        static_is_new = reducer._usage.static and reducer._order is not None
        if not reducer._may_repeat or static_is_new or not reducer._recovery.clear:
            return
        reducer._flight.step += 1
        reducer._repeated = True
        reducer._arm()
    reducer._begin()


def _on_gradient(
    reference: weakref.ref[Reducer], index: int, _: object, incoming: tuple[Tensor | None, ...]
) -> None:
    """A parameter's gradient is ready: the one step that is taken for each of them.

    Holds no reference that would keep the reducer alive.
    """
    reducer = reference()
    if reducer is None or incoming[0] is None:
        return
    if not reducer._armed:
        reducer._usage.touched.add(index)
        return
    if not reducer._callback_queued:
        reducer._begin()
    if reducer._order is not None:
        reducer._order.append(index)
    bucket = reducer._buckets.of[index]
    bucket.arrived.append(index)
    if index in bucket.early:
        try:
            bucket.gather_early(index, incoming[0])
        except (ReductionError, NotSupportedError) as error:
            reducer._recovery.fail(error)
    if len(bucket.arrived) >= bucket.expected:
        reducer._on_full(bucket)


def _remove(handles: Sequence[Any]) -> None:
    for handle in handles:
        handle.remove()
