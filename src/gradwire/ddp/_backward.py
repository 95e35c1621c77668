"""One backward: gradients arrive, full buckets are launched, what comes back is handed out.

The reducer's engine. Its hot path is `on_gradient`, which autograd calls for each parameter.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Sequence
from time import perf_counter_ns
from typing import NoReturn, cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from gradwire.ddp._bucket import Bucket
from gradwire.ddp._bucket_set import BucketSet
from gradwire.ddp._in_backward import step_and_clear
from gradwire.ddp._in_flight import InFlight, Launched
from gradwire.ddp._launch import Launcher
from gradwire.ddp._log import Clock
from gradwire.ddp._planning import Planner
from gradwire.ddp._sparse import SparseBucket
from gradwire.ddp._usage import Usage
from gradwire.ddp.faults.backward_state import BackwardState, Event, after
from gradwire.ddp.faults.fault_domain import FaultDomain
from gradwire.ddp.faults.waiting import Pending
from gradwire.errors import NotSupportedError, ReductionError

__all__ = ["Backward", "on_gradient", "on_output"]

logger = logging.getLogger(__name__)

# names of their own: looking them up in the enum takes longer, and each gradient compares them
LOCAL, REDUCED = BackwardState.LOCAL, BackwardState.REDUCED
EXPECTED, SHORT = BackwardState.EXPECTED, BackwardState.SHORT
RUNNING, RUNNING_AGAIN = BackwardState.RUNNING, BackwardState.RUNNING_AGAIN
AWAITING, COMMITTING = BackwardState.AWAITING, BackwardState.COMMITTING
FINALIZED = BackwardState.FINALIZED


class Backward:
    """What has arrived, what is under way, and what is known from backwards before.

    Args:
        planner: Makes the buckets.
        usage: Which parameters a backward uses.

    Attributes:
        state: Where the backward is.
        end: The position of its last message in the group's log, while COMMITTING or UNDECIDED.
        order: The order of arrival, until buckets have been rebuilt.
        ready: That of the first backward that was reduced, until then.
        has_place: Whether its place among the reducers of the running backward is known.
        before: Those of the group that have an earlier place in the same backward: theirs go first.
        skip_unused: Whether buckets are skipped that are unused.
        manual: Whether a backward ends with `finalize` instead of by itself.
        unused_here: Names of what was absent on this rank in the last one.
        optimized: Parameters whose optimizers step during backward.
    """

    def __init__(self, planner: Planner, usage: Usage) -> None:
        self.planner, self.usage = planner, usage
        self.skip_unused = self.manual = False
        self._names, self._parameters = planner.names, planner.parameters
        self.buckets, self.clock = BucketSet(planner), Clock()
        self.state, self.end, self.runs, self._task = LOCAL, 0, 0, -1
        self.has_place = True
        self.before: set[Backward] = set()
        self._had_nothing = self._takes_part = False
        self.unused_here: tuple[str, ...] = ()
        self.optimized: Sequence[Parameter] = ()
        self.order: list[int] | None = []
        self.ready: Sequence[int] | None = None
        self.set_group(planner.group)
        self._make_buckets(planner.first_order())

    def set_group(self, group: ProcessGroup) -> None:
        """Communicates over a group from now on, without a hook."""
        self._group = self.planner.group = group
        self._ranks = group.size()
        self.flight = InFlight()
        self.domain = FaultDomain.of(group)
        self.domain.register(self)
        self.launcher = Launcher(group, self.flight, self.domain, self)

    @property
    def unfinished(self) -> bool:
        """Whether a backward began, and did not end with everything reduced."""
        return self.state not in (LOCAL, EXPECTED, REDUCED, FINALIZED)

    @property
    def _untouched(self) -> bool:
        """Whether it is a backward of other things than parameters, as far as is known."""
        return self.buckets.untouched and not (self._had_nothing or self._takes_part)

    def pending(self) -> list[Pending]:
        """What is under way."""
        return self.flight.pending()

    def arm(self, ranks: int | None = None) -> None:
        """Expect a backward; `ranks` are to be divided by, if not as many as the last time."""
        self._ranks = ranks or self._ranks
        self.launcher.correction = ratio = self._group.size() / self._ranks
        if self.usage.recording:
            self.buckets.defer(until_the_end=True)
        if ratio != 1.0 and self.launcher.hook is None:
            for bucket in self.buckets:
                bucket.scale *= ratio

    def prepare(self, ranks: int | None) -> None:
        """Expect the backward of a forward."""
        self.flight.step += 1
        self.clock.start()
        self.state = after(self.state, Event.PREPARE)
        self.arm(ranks)

    def begin(self, index: int | None = None, incoming: Tensor | None = None) -> None:
        """The first gradient of a backward, or that of an output, is there."""
        with self.domain.lock:  # on several devices, autograd has a thread for each
            if self.state is RUNNING or self.state is RUNNING_AGAIN:
                return
            if self.manual and self.state in (AWAITING, COMMITTING):
                self._not_finalized()
            self.domain.recover()
            self.domain.poll_known(self)
            if self.state is REDUCED:
                self.flight.step += 1
                self.state = after(self.state, Event.BEGIN_AGAIN)
                self.arm()
            else:
                self.state = after(self.state, Event.BEGIN)
            self.planner.ownership.begin(self._parameters, index, incoming)
            self.has_place = False
            if index is None or not self.usage.find_unused or not self._others():
                self.take_place()
            self.runs += 1
            self._task = torch._C._current_graph_task_id()
            engine = torch.autograd.Variable._execution_engine
            engine.queue_callback(_End(self, self.runs))
        self.clock.backward = self.clock.backward or perf_counter_ns()
        if torch.is_grad_enabled():
            self.buckets.defer(with_graph=True)
        if self.usage.find_unused:
            self._leave_out_absent(at_output=index is None)

    def take_place(self) -> None:
        """Sends after the reducers that have a place in this backward already.

        Where parameters may be left out, that is the order in which backward reaches the outputs:
        a gradient may come before them on one rank, from the loss, and after them on another.
        """
        with self.domain.lock:
            self.has_place, running = True, (RUNNING, RUNNING_AGAIN)
            self.before |= {b for b in self._others() if b.state in running and b.has_place}

    def _leave_out_absent(self, *, at_output: bool) -> None:
        """What the graph does not have is absent.

        If that is all, it is known when backward has ended: until then a reentrant checkpoint,
        whose graph is not there yet, may bring some.
        """
        absent = self.usage.absent()
        if absent is None:
            return
        used = len(absent) < len(self._parameters)
        if used:
            self.buckets.leave_out(absent)
        if at_output and any(p.requires_grad for p in self._parameters):
            # gradients may all have come before the output's, from the loss, or none may come
            self._takes_part = used or self.usage.runs_all()

    def on_nothing(self, index: int) -> None:
        """A parameter's node was run, and had no gradient: others may have one."""
        if not (self.state is RUNNING or self.state is RUNNING_AGAIN):
            self.begin(index)
        if self.order is not None:
            self.order.append(index)
        self._had_nothing = True
        bucket = self.buckets.of[index]
        bucket.leave_out([index])
        if bucket.full:
            self.on_full(bucket)

    def on_full(self, bucket: Bucket) -> None:
        """A bucket has all its gradients, or more."""
        if surplus := bucket.surplus():
            self.domain.fail(
                ReductionError(
                    f"parameters {surplus} got a gradient twice in one backward, or one that was "
                    "not expected: they are used in several reentrant checkpoints (use "
                    "use_reentrant=False, or static_graph=True), or with static_graph=True the "
                    "graph is another than in the first backward",
                    surplus,
                )
            )
        if not self.has_only_last_left():
            with torch.no_grad():
                self._launch_in_order(final=False)

    def _others(self) -> Sequence[Backward]:
        """The other reducers of the group."""
        return cast("Sequence[Backward]", self.domain.others(self))

    def _launch_in_order(self, *, final: bool) -> None:
        """Launches every full bucket whose predecessors have been launched.

        The last one only when backward has ended: whatever fails before, fails before all ranks
        have sent it, and so none of them takes the result. Reducers that share a backward go one
        after the other, their last buckets at the end likewise: a gradient that one of them lacks
        on one rank must not let another's bucket meet its own.
        """
        if not self.has_place or any(not b.has_only_last_left() for b in self.before):
            return
        self._launch_full(final=final)
        if not final and self.has_only_last_left():
            for other in self._others():
                if self in other.before:
                    other._launch_in_order(final=False)

    def has_only_last_left(self) -> bool:
        """Whether all buckets have been launched but the last."""
        launched = len(self.flight.launched)
        return launched >= len(self.buckets) or self._is_last(launched)

    def _launch_full(self, *, final: bool) -> None:
        launched = self.flight.launched
        with self.domain.lock:
            self.domain.poll_known(self)  # nothing is sent while ranks resynchronize
            self.domain.connect()
            while len(launched) < len(self.buckets):
                bucket = self.buckets[len(launched)]
                is_last = self._is_last(len(launched))
                if not bucket.full or (is_last and not final):
                    return
                if self.skip_unused and len(bucket.absent) == len(bucket.members):
                    launched.append(Launched(bucket))
                    continue
                self.launcher.gather(bucket)
                self.clock.launch = self.clock.launch or perf_counter_ns()
                self._launch(bucket, is_last=is_last)

    def _is_last(self, index: int) -> bool:
        """Whether no bucket after this one has anything to send."""
        if not self.skip_unused:
            return index + 1 == len(self.buckets)
        return all(len(b.absent) == len(b.members) for b in self.buckets.after(index))

    def _launch(self, bucket: Bucket, *, is_last: bool) -> None:
        alone = self.launcher.hook is None and not self.usage.tolerant
        if is_last and alone and not isinstance(bucket, SparseBucket):
            self._sending_last()
        self.launcher.launch(bucket, is_last=is_last)

    def _sending_last(self) -> None:
        """The backward's last message is about to be sent."""
        self.end = self.domain.position() + 1
        self.state = after(self.state, Event.SEND_LAST)

    def on_end(self, run: int) -> None:
        """Autograd has come to the end of a backward."""
        if self.state is FINALIZED and run == self.runs:
            self.state = after(self.state, Event.END_UNTOUCHED)
            return
        if run != self.runs or not (self.state is RUNNING or self.state is RUNNING_AGAIN):
            self.domain.poll_known(self)  # it failed with another reducer's
            return
        try:
            self._end()
        except BaseException:
            self.interrupt()
            raise

    def _end(self) -> None:
        if self._untouched:  # gradients of other things than parameters
            self.buckets.reset()
            self.state = after(self.state, Event.END_UNTOUCHED)
            if self.state is EXPECTED:
                self.arm()
            return
        self.clock.computed = perf_counter_ns()
        with torch.no_grad():
            self._leave_out_missing()
            if not self.has_place:
                self.take_place()
            if not self.before:
                self._launch_others()
                self._launch_in_order(final=True)
            if len(self.flight.launched) < len(self.buckets):
                self.state = after(self.state, Event.END_SHORT)  # another may bring the rest
            elif not self.manual:
                self._finish()
                self._finish_others()
            elif self.state is not COMMITTING:
                self.state = after(self.state, Event.END_MANUAL)

    def _launch_others(self) -> None:
        """Sends what others of this backward have sent before its last on ranks that use more."""
        if others := self._others():
            for other in others:
                running = other.state is RUNNING or other.state is RUNNING_AGAIN
                if running and other._task == self._task and not other._untouched:
                    other._leave_out_missing()
            self._launch_in_order(final=False)

    def finalize(self) -> None:
        """Ends a backward of a manual reducer, after it or in one of its hooks.

        Raises:
            ReductionError: It is not manual, or there is nothing to end, or not yet.
        """
        running = self.state in (RUNNING, RUNNING_AGAIN)
        if not self.manual or not (running or self.state in (SHORT, AWAITING, COMMITTING)):
            raise ReductionError(
                "there is no reduction to finalize: set require_manual_backward_finalization "
                "before a forward outside no_sync(), run its backward, and call "
                "finalize_backward() once"
            )
        with torch.no_grad():
            if running and not self.has_place:
                self.take_place()
            if running and not self.before:
                self._launch_in_order(final=True)
            if len(self.flight.launched) < len(self.buckets):
                lacking = [self._names[i] for i in sorted(self.buckets.missing())]
                raise ReductionError(
                    f"parameters {lacking} have no gradient yet: call finalize_backward() when "
                    "all have, and after backward while should_finalize_after_backward is true",
                    lacking,
                )
            if running:
                self.clock.computed = perf_counter_ns()
            try:
                self._finish()
            except BaseException:
                self.interrupt()
                raise
        if running:
            self.state = after(self.state, Event.FINALIZE)  # autograd has yet to come to its end
        self._finish_others()

    def _finish_others(self) -> None:
        """Ends those that had come to their end, and waited for this one."""
        for other in self._others():
            if other.state is SHORT and not other.before and not other.buckets.missing():
                other.state = after(other.state, Event.BEGIN)
                other.on_end(other.runs)

    def interrupt(self) -> None:
        """An exception ends the running backward, if it has not been dealt with."""
        if self.state in (RUNNING, RUNNING_AGAIN, AWAITING, COMMITTING, SHORT, EXPECTED):
            self.state = after(self.state, Event.INTERRUPT)
            self.domain.note_interrupted()

    def _not_finalized(self) -> NoReturn:
        self.domain.fail(
            ReductionError(
                "the backward before was not finalized: with require_manual_backward_finalization, "
                "call finalize_backward() once for each backward that is reduced"
            )
        )

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
        results = self._receive(self.buckets.arrived())
        if self.usage.tolerant:
            untouched |= self.usage.unused
        for other in self._others():
            other.keep_local()
        for launched, reduced in zip(self.flight.launched, results, strict=True):
            launched.bucket.scatter(reduced, untouched)
        step_and_clear(self.optimized)
        self.clock.sent = self.flight.sent
        self.unused_here = tuple(self._names[i] for i in sorted(absent))
        if absent:
            logger.debug("step %d: unused here: %s", self.flight.step, self.unused_here)
        self.clock.finished = perf_counter_ns()
        self._commit(self.buckets.arrived())

    def keep_local(self) -> None:
        """Another reducer of the same backward is about to write to gradients."""
        ownership = self.planner.ownership
        if ownership.shared and self.state in (RUNNING, RUNNING_AGAIN, SHORT):
            arrived = set(self.buckets.arrived())
            waiting = self.buckets.after(len(self.flight.launched) - 1)
            pending = {i for bucket in waiting for i in bucket.members}
            if self.state is SHORT:
                pending -= set(self.buckets.missing())  # they are yet to come
            ownership.keep_local(self._parameters, pending, arrived)

    def _receive(self, used: Iterable[int]) -> list[Tensor | None]:
        """Sends what is left to be sent and waits for everything.

        What comes back is the same on all ranks, or comes back on none: with a hook, which may fail
        after its collectives, ranks vote; without one, the last message is the vote.
        """
        launcher, sums, results = self.launcher, None, []
        if self.usage.tolerant:
            if launcher.hook is None:
                self._sending_last()
            sums = launcher.add_up(self.usage.flags(used))
        if launcher.hook is None and self.state is not COMMITTING:  # the last one was sparse
            self.end = self.domain.position()
            self.state = after(self.state, Event.SEND_LAST)
        if sums is not None:
            launcher.wait_small(sums[1])
            self.usage.receive(sums[0])
        for launched in self.flight.launched:
            since = perf_counter_ns()
            results.append(launcher.result(launched))
            self.clock.waits.append(perf_counter_ns() - since)
        if launcher.hook is not None:
            self._sending_last()
            launcher.count(*launcher.vote())
        return results

    def _commit(self, used: Sequence[int]) -> None:
        """Gradients hold what was reduced."""
        self.domain.committed(self.end)
        if self.order is not None:
            self.ready = [*dict.fromkeys([*(self.ready or ()), *self.order])]
        if self.usage.recording:
            self.usage.record(used)
        self.state = after(self.state, Event.COMMIT)
        self._clear()

    def shadow(self) -> None:
        """Takes part in the other ranks' backward with zeros."""
        try:
            with torch.no_grad(), self.domain.lock:
                self.domain.connect()
                for number, bucket in enumerate(self.buckets, 1):
                    bucket.blank()
                    self._launch(bucket, is_last=number == len(self.buckets))
                self._receive(())
        except BaseException:
            self.interrupt()
            raise
        self._commit(range(len(self._parameters)))

    def plan_anew(self, order: Sequence[int], *, keep_state: bool = True) -> None:
        """Buckets for parameters that become ready in this order, until it is known better."""
        self.order, self.ready = [], None
        self._make_buckets(order, keep_state=keep_state)
        if self.state is EXPECTED:
            self.arm()

    def _make_buckets(self, order: Sequence[int], *, keep_state: bool = True) -> None:
        self.planner.counts = self.usage.counts
        state = self.launcher.state if keep_state else None
        self.buckets.make(order, with_hook=self.launcher.hook is not None, state=state)

    def rebuild(self, order: Sequence[int]) -> None:
        """Makes the buckets anew in the order in which rank 0's gradients became ready."""
        agreed = self.launcher.agree([*dict.fromkeys([*order, *self.planner.first_order()])])
        self._clear()
        self.order = self.ready = None
        never = self.usage.unused if self.usage.static else frozenset()
        self._make_buckets([i for i in agreed if i not in never])

    def recover(self) -> None:
        """Say why the backward before did not end, or bring the other ranks out of it.

        Raises:
            ReductionError: It left parameters without a gradient.
            DistributedError: As `FaultDomain.raise_waiting`.
        """
        if self.state is RUNNING or self.state is RUNNING_AGAIN:
            self.interrupt()
        if self.manual and self.state in (AWAITING, COMMITTING):
            self._not_finalized()
        self.domain.recover()
        self.domain.raise_waiting()
        if self.state is not SHORT:
            return
        short = [b for b in (self, *self._others()) if b.state is SHORT]
        lacking = [b._names[i] for b in short for i in sorted(b.buckets.missing())]
        self.domain.fail(
            ReductionError(
                f"parameters {lacking} got no gradient in the backward before, so that nothing "
                "was reduced: make every output of the module take part in the loss, set "
                "find_unused_parameters=True, or requires_grad=False on those parameters",
                lacking,
            )
        )

    def _clear(self) -> None:
        """Nothing has arrived, nothing is under way."""
        self._had_nothing = self._takes_part = False
        self.flight.clear()
        self.planner.ownership.clear()
        self.before.clear()
        for other in self._others():
            other.before.discard(self)
        if self.order is not None:
            self.order.clear()
        self.buckets.reset()

    def reset(self) -> None:
        """Give the running backward up."""
        self.state = after(self.state, Event.RESET)
        self.launcher.forget()
        self._clear()

    def start_over(self) -> None:
        """As after construction: ranks may have been at different bucket plans."""
        self.reset()
        self.usage.forget()
        self.plan_anew(self.planner.first_order())


class _End:
    """What autograd calls when a backward ends, and drops uncalled when an exception ends it."""

    def __init__(self, backward: Backward, run: int) -> None:
        self._backward, self._run, self._called = backward, run, False

    def __call__(self) -> None:
        self._called = True
        self._backward.on_end(self._run)

    def __del__(self) -> None:
        backward = self._backward
        running = backward.state is RUNNING or backward.state is RUNNING_AGAIN
        if not self._called and running and self._run == backward.runs:
            backward.interrupt()


def on_output(reference: weakref.ref[Backward], _: Tensor) -> None:
    """A backward begins at an output: the first after its forward, or another one."""
    backward = reference()
    if backward is None:
        return
    state = backward.state
    if state in (RUNNING, RUNNING_AGAIN) and not backward.has_place:
        backward.take_place()
    if state in (RUNNING, RUNNING_AGAIN, LOCAL, FINALIZED):
        return
    if state is REDUCED and backward.usage.static and backward.order is not None:
        return  # a static graph's second backward goes by the first one's, which is not known yet
    backward.begin()


def on_gradient(
    reference: weakref.ref[Backward], index: int, _: object, incoming: tuple[Tensor | None, ...]
) -> None:
    """A parameter's gradient is ready: the one step that is taken for each of them.

    Holds no reference that would keep the reducer alive.
    """
    backward = reference()
    if backward is None:
        return
    # no name for what came in: who may write to it is told by counting references to it
    state = backward.state
    running = state is RUNNING or state is RUNNING_AGAIN
    if not running and state is not EXPECTED and state is not SHORT:
        if incoming[0] is not None:
            planner = backward.planner
            backward.usage.touched.add(index)
            planner.ownership.make_private(index, planner.parameters[index], incoming[0])
        return
    if incoming[0] is None:
        backward.on_nothing(index)
        return
    if not running:
        backward.begin(index, incoming[0])
    if backward.order is not None:
        backward.order.append(index)
    bucket = backward.buckets.of[index]
    bucket.arrived.append(index)
    if index in bucket.early:
        try:
            bucket.gather_early(index, incoming[0])
        except (ReductionError, NotSupportedError) as error:
            backward.domain.fail(error)
    if len(bucket.arrived) >= bucket.expected:
        backward.on_full(bucket)
