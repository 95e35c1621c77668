"""One backward: gradients arrive, full buckets are launched, what comes back is handed out.

The reducer's engine. Its hot path is `on_gradient`, which autograd calls for each parameter.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Sequence
from time import perf_counter_ns

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from gradwire.ddp._bucket import Bucket
from gradwire.ddp._bucket_set import BucketSet
from gradwire.ddp._flight import Flight, Launched
from gradwire.ddp._in_backward import step_and_clear
from gradwire.ddp._launch import Launcher
from gradwire.ddp._log import Clock
from gradwire.ddp._planning import Planner
from gradwire.ddp._recovery import Recovery
from gradwire.ddp._usage import Usage
from gradwire.errors import NotSupportedError, ReductionError

__all__ = ["Backward", "on_gradient", "on_output"]

logger = logging.getLogger(__name__)


class Backward:
    """What has arrived, what is under way, and what is known from backwards before.

    Args:
        planner: Makes the buckets.
        usage: Which parameters a backward uses.

    Attributes:
        armed: Whether gradients that arrive are to be reduced.
        callback_queued: Whether the engine will call when the running backward has ended.
        may_repeat: Whether another backward through the last forward's outputs is reduced too.
        order: The order of arrival, until buckets have been rebuilt.
        skip_unused: Whether buckets are skipped that are unused.
        reduced_once: Whether a backward has been reduced since the buckets were planned anew.
        unused_here: Names of what was absent on this rank in the last one.
        optimized: Parameters whose optimizers step during backward.
    """

    def __init__(self, planner: Planner, usage: Usage) -> None:
        self.planner, self.usage, self.skip_unused = planner, usage, False
        self._names, self._parameters = planner.names, planner.parameters
        self.buckets, self.clock = BucketSet(planner), Clock()
        self.armed = self.callback_queued = self.may_repeat = self.reduced_once = False
        self._repeated = self._ended_short = False
        self.unused_here: tuple[str, ...] = ()
        self.optimized: Sequence[Parameter] = ()
        self.order: list[int] | None = []
        self.connect(planner.group)
        self._make_buckets(planner.first_order())

    def connect(self, group: ProcessGroup) -> None:
        """Communicates over a group from now on, without a hook."""
        self._group = self.planner.group = group
        self._ranks = group.size()
        self.flight = Flight(group)
        self.recovery = Recovery(group, self.flight, self._reset, self.start_over)
        self.launcher = Launcher(group, self.flight, self.recovery)

    @property
    def unfinished(self) -> bool:
        """Whether a backward began, and did not end with everything reduced."""
        return self.armed and (self.callback_queued or not self.buckets.untouched)

    def arm(self, ranks: int | None = None) -> None:
        """Expect a backward; `ranks` are to be divided by, if not as many as the last time."""
        self.armed = self.may_repeat = True
        self._ranks = ranks or self._ranks
        self.launcher.correction = ratio = self._group.size() / self._ranks
        if self.usage.recording:
            self.buckets.defer(until_the_end=True)
        if ratio != 1.0 and self.launcher.hook is None:
            for bucket in self.buckets:
                bucket.scale *= ratio

    def repeat(self) -> None:
        """Expect another backward through the outputs of the last forward."""
        self.flight.step += 1
        self._repeated = True
        self.arm()

    def begin(self) -> None:
        """The first gradient of a backward, or that of an output, is there."""
        engine = torch.autograd.Variable._execution_engine
        engine.queue_callback(self._on_backward_end)
        self.callback_queued = True
        self.clock.backward = self.clock.backward or perf_counter_ns()
        if torch.is_grad_enabled():
            self.buckets.defer(with_graph=True)
        if self.usage.find_unused:
            self.buckets.leave_out(self.usage.absent())

    def on_full(self, bucket: Bucket) -> None:
        """A bucket has all its gradients, or more."""
        if surplus := bucket.surplus():
            self.recovery.fail(
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
        launched = self.flight.launched
        while len(launched) < len(self.buckets):
            bucket = self.buckets[len(launched)]
            if not bucket.full:
                return
            if launched and (future := launched[-1].future) and self.launcher.one_at_a_time:
                if not (wait or future.done()):
                    return
                self.launcher.result(launched[-1])
            if self.skip_unused and len(bucket.absent) == len(bucket.members):
                launched.append(Launched(bucket))
                continue
            self.launcher.gather(bucket)
            self.clock.launch = self.clock.launch or perf_counter_ns()
            self.launcher.launch(bucket, is_last=len(launched) + 1 == len(self.buckets))

    def _on_backward_end(self) -> None:
        self.callback_queued = False
        if not self.armed:
            return
        if self.buckets.untouched:  # gradients of other things than parameters
            self.buckets.reset()
            if self._repeated:
                self.armed = False
            else:
                self.arm()
            return
        self.clock.computed = perf_counter_ns()
        with torch.no_grad():
            self._leave_out_missing()
            self._launch_in_order(wait=True)
            if len(self.flight.launched) < len(self.buckets):
                self._ended_short = True  # another backward may bring the rest
                return
            self._finish()

    def _leave_out_missing(self) -> None:
        """What did not come, and was free not to, is absent."""
        if self.usage.recording:
            self.buckets.complete()
        elif missing := self.buckets.missing():
            needed = (i for i in missing if self._parameters[i].requires_grad)
            if self.usage.find_unused or next(needed, None) is None:
                self.buckets.leave_out(missing)

    def _finish(self) -> None:
        """Waits for the buckets and hands the gradients what came back."""
        absent = self.buckets.absent()
        untouched = {i for i in absent if not self._parameters[i].requires_grad}
        if self.usage.tolerant:
            self._exchange_usage(self.buckets.arrived())
            untouched |= self.usage.unused
        results = []
        for launched in self.flight.launched:
            since = perf_counter_ns()
            results.append(self.launcher.result(launched))
            self.clock.waits.append(perf_counter_ns() - since)
        if self.launcher.hook is not None:
            self.recovery.vote()  # gradients change on all ranks or on none
        for launched, reduced in zip(self.flight.launched, results, strict=True):
            launched.bucket.scatter(reduced, untouched)
        step_and_clear(self.optimized)
        self.reduced_once = True
        self.clock.sent = self.flight.sent
        self.unused_here = tuple(self._names[i] for i in sorted(absent))
        if absent:
            logger.debug("step %d: unused here: %s", self.flight.step, self.unused_here)
        self.clock.finished = perf_counter_ns()
        if self.usage.recording:
            self.usage.record(self.buckets.arrived())
        self._reset()

    def _exchange_usage(self, used: Iterable[int]) -> None:
        self.usage.receive(self.launcher.add_up(self.usage.flags(used)))

    def shadow(self) -> None:
        """Takes part in the other ranks' backward with zeros."""
        with torch.no_grad():
            for number, bucket in enumerate(self.buckets, 1):
                if self.flight.launched and self.launcher.one_at_a_time:
                    self.launcher.result(self.flight.launched[-1])
                bucket.blank()
                self.launcher.launch(bucket, is_last=number == len(self.buckets))
            if self.usage.tolerant:
                self._exchange_usage(())
            for launched in self.flight.launched:
                self.launcher.result(launched)
            if self.launcher.hook is not None:
                self.recovery.vote()
        self.reduced_once = True
        if self.usage.recording:
            self.usage.record(range(len(self._parameters)))
        self._reset()

    def plan_anew(self, order: Sequence[int], *, keep_state: bool = True) -> None:
        """Buckets for parameters that become ready in this order, until it is known better."""
        self.order, self.reduced_once, self.armed = [], False, False
        self._make_buckets(order, keep_state=keep_state)

    def _make_buckets(self, order: Sequence[int], *, keep_state: bool = True) -> None:
        self.planner.counts = self.usage.counts
        state = self.launcher.state if keep_state else None
        self.buckets.make(order, with_hook=self.launcher.hook is not None, state=state)

    def rebuild(self, order: Sequence[int]) -> None:
        """Makes the buckets anew in the order in which rank 0's gradients became ready."""
        agreed = self.launcher.agree([*dict.fromkeys([*order, *self.planner.first_order()])])
        self._reset()
        self.order = None
        never = self.usage.unused if self.usage.static else frozenset()
        self._make_buckets([i for i in agreed if i not in never])

    def end_unfinished(self) -> None:
        """The backward before did not end: say why, or bring the other ranks out of it."""
        if all(bucket.full for bucket in self.buckets):
            self._on_backward_end()  # interrupted after the last gradient: nothing is lacking
            return
        if not self._ended_short:
            self.recovery.interrupted()
            return
        lacking = [self._names[i] for i in sorted(self.buckets.missing())]
        self.recovery.fail(
            ReductionError(
                f"parameters {lacking} got no gradient in the backward before, so that nothing "
                "was reduced: make every output of the module take part in the loss, set "
                "find_unused_parameters=True, or requires_grad=False on those parameters",
                lacking,
            )
        )

    def _reset(self) -> None:
        """Ready for the next `prepare`."""
        self.armed = self._repeated = self._ended_short = self.callback_queued = False
        self.flight.clear()
        if self.order is not None and not self.reduced_once:
            self.order.clear()
        self.buckets.reset()

    def start_over(self) -> None:
        """As after construction: ranks may have been at different bucket plans."""
        self._reset()
        self.usage.forget()
        self.plan_anew(self.planner.first_order())


def on_output(reference: weakref.ref[Backward], _: Tensor) -> None:
    """A backward begins at an output: the first after its forward, or another one."""
    backward = reference()
    if backward is None or backward.callback_queued:
        return
    if not backward.armed:
        static_is_new = backward.usage.static and backward.order is not None
        if not backward.may_repeat or static_is_new or not backward.recovery.clear:
            return
        backward.repeat()
    backward.begin()


def on_gradient(
    reference: weakref.ref[Backward], index: int, _: object, incoming: tuple[Tensor | None, ...]
) -> None:
    """A parameter's gradient is ready: the one step that is taken for each of them.

    Holds no reference that would keep the reducer alive.
    """
    backward = reference()
    if backward is None or incoming[0] is None:
        return
    if not backward.armed:
        backward.usage.touched.add(index)
        return
    if not backward.callback_queued:
        backward.begin()
    if backward.order is not None:
        backward.order.append(index)
    bucket = backward.buckets.of[index]
    bucket.arrived.append(index)
    if index in bucket.early:
        try:
            bucket.gather_early(index, incoming[0])
        except (ReductionError, NotSupportedError) as error:
            backward.recovery.fail(error)
    if len(bucket.arrived) >= bucket.expected:
        backward.on_full(bucket)
