"""State of one reducer's backward, with the methods that prepare, commit and reset it.

`arrival` (autograd's hooks), `launch_order` and `finalize` call these methods.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import NoReturn

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from gradwire.ddp.buckets.assignment import BucketAssigner
from gradwire.ddp.buckets.bucket_set import BucketSet
from gradwire.ddp.faults.fault_domain import FaultDomain
from gradwire.ddp.faults.protocol import TRANSITIONS, BackwardState, Event, after
from gradwire.ddp.faults.waiting import InFlight
from gradwire.ddp.reducer.bookkeeping import ArrivalOrder, LocalBackwards, ReplicaSums, Turn
from gradwire.ddp.reducer.bypasses import detach_optimizer_hooks, has_new_hooks
from gradwire.ddp.reducer.launch import Launcher
from gradwire.ddp.reducer.log import StepTimer
from gradwire.ddp.reducer.streams import GradientStreams
from gradwire.ddp.reducer.tally import Forwards, Tally
from gradwire.ddp.reducer.usage import Usage
from gradwire.ddp.reducer.weights import Weights
from gradwire.errors import ReductionError


class Backward:
    """Gradients that have arrived, buckets in flight, and results of earlier backwards.

    Args:
        assigner: Assigner of parameters to buckets.
        usage: Record of the parameters that a backward uses.

    Attributes:
        buckets: Buckets in launch order.
        launcher: Sender of buckets, with those in flight.
        domain: Fault domain of the group, shared with the group's other reducers.
        timer: Times of the events in this step.
        streams: Streams of an accelerator on which gradients arrive.
        state: State of the backward.
        end: Position of its last message in the group's log, while COMMITTING or UNDECIDED.
        step: Number of backwards prepared on this rank.
        runs: Number of backwards that have begun. Identifies the callback of an earlier one.
        task: Autograd's id of the running backward.
        turn: Position among the group's reducers that share the running backward.
        parked: True from its end in autograd until all reducers of other groups that share the
            backward have reached theirs.
        order: Order in which gradients arrive, until buckets are final.
        had_undefined: True if autograd passed None instead of a parameter's gradient.
        takes_part: True if the backward counts as this rank's even if no parameter gets a gradient.
        ranks: Number of ranks that gradients are divided by.
        skip_unused: True if unused buckets are skipped.
        manual: True if `finalize_manually` ends a backward, False if it ends by itself.
        weights: Weights of the gradients.
        reword: Converts an unexpected-gradient error into the one raised on all ranks.
        shadowed: True if a rank takes part by `shadow`, and waits for one backward.
        local: Running backwards of forwards under `no_sync`, while another one is expected.
        optimized: Parameters whose optimizers step during backward.
        forwards: Counts of forwards whose backward is reduced, and of those that had none.
        replicas: Sums of what is sent to compare replicas.
        prepare_late: Prepares the backward of a forward that ran in a transform of `torch.func`.
            The result of a transform may have a backward or not.
    """

    def __init__(self, assigner: BucketAssigner, usage: Usage) -> None:
        self.assigner, self.usage = assigner, usage
        self.names, self.parameters = assigner.names, assigner.parameters
        self.buckets, self.timer = BucketSet(assigner), StepTimer()
        self.streams = GradientStreams(self.parameters)
        self.state, self.end, self.runs = BackwardState.LOCAL, 0, 0
        self.task, self.parked = -1, False
        self.turn: Turn[Backward] = Turn()
        self.order = ArrivalOrder(rebuild=assigner.options.rebuilds)
        self.had_undefined = self.takes_part = False
        self.manual = assigner.options.manual_finalization
        self.skip_unused = self.shadowed = False
        self.reword: Callable[[ReductionError], ReductionError | None] | None = None
        self.forwards = Forwards()
        self.replicas, self.local = ReplicaSums(), LocalBackwards()
        self.prepare_late: weakref.WeakMethod[Callable[[], None]] | None = None
        self.weights = Weights(assigner.parameters, usage.nodes)
        self.detach_optimizers()
        self.set_group(assigner.group)
        self._make_buckets(assigner.first_order())

    def detach_optimizers(self) -> None:
        """Take over from optimizers that would step during backward with local gradients."""
        self.optimized = detach_optimizer_hooks(self.parameters)

    def set_group(self, group: ProcessGroup) -> None:
        """Communicate over a group from now on, without a communication hook."""
        self.group = self.assigner.group = group
        self.ranks = group.size()
        self.step = 0
        self.domain = FaultDomain.of(group)
        self.domain.participants.add(self)
        self.weights.fail = self.domain.fail
        self.launcher = Launcher(group, self.domain, self)

    # -- state -----------------------------------------------------------------------------

    @property
    def running(self) -> bool:
        """True while autograd runs the backward."""
        return self.state in (BackwardState.RUNNING, BackwardState.RUNNING_AGAIN)

    @property
    def awaits_finalization(self) -> bool:
        """True if a backward has ended that the caller has not finalized yet."""
        return self.manual and self.state in (BackwardState.AWAITING, BackwardState.COMMITTING)

    @property
    def untouched(self) -> bool:
        """True if the backward has reached none of the parameters so far."""
        return self.buckets.untouched and not (self.had_undefined or self.takes_part)

    @property
    def must_rebuild(self) -> bool:
        """True before the second backward of a static graph, which begins with other buckets."""
        return self.usage.static and self.order.arrivals is not None

    def transition(self, event: Event) -> None:
        """Change to the state that follows an event."""
        self.state = after(self.state, event)

    def others(self) -> Sequence[Backward]:
        """Return the backwards of the group's other reducers."""
        return self.domain.participants.others(self)

    def sharing(self) -> list[Backward]:
        """Return the backwards of other groups that run in the same backward of autograd."""
        elsewhere = self.domain.elsewhere()
        return [b for b in elsewhere if b.running and b.task == self.task] if elsewhere else []

    def in_flight(self) -> list[InFlight]:
        """Return the messages in flight."""
        return self.launcher.in_flight()

    # -- preparation -----------------------------------------------------------------------

    def prepare_for_backward(self, ranks: int, *, uneven: bool, shadowed: bool) -> None:
        """Expect the backward of a forward; see `Reducer.prepare`."""
        self.skip_unused = self.assigner.options.skip_unused and not uneven
        self.shadowed = shadowed
        self.step += 1
        self.prepare_late = None
        self.timer.start()
        self.transition(Event.PREPARE)
        self.prepare_buckets(ranks)

    def prepare_buckets(self, ranks: int | None = None) -> None:
        """Expect gradients, to be divided by `ranks`; None keeps the last divisor."""
        self.buckets.finish_making()
        self.ranks = ranks or self.ranks
        self.launcher.correction = ratio = self.group.size() / self.ranks
        if self.usage.recording:
            self.buckets.defer(until_the_end=True)
        if ratio != 1.0 and self.launcher.hook is None:
            for bucket in self.buckets:
                bucket.scale *= ratio

    def begin(self, index: int | None, incoming: Tensor | None) -> int:
        """Begin at the gradient of this parameter, or of an output if None; return the run."""
        if has_new_hooks():  # registered after the forward
            self.detach_optimizers()
        if self.state is BackwardState.REDUCED:
            self.step += 1
            self.transition(Event.BEGIN_AGAIN)
            self.prepare_buckets()
        else:
            self.transition(Event.BEGIN)
        self.assigner.ownership.begin(self.parameters, index, incoming)
        self.turn.wait()
        if index is None or not self.usage.find_unused or not self.others():
            self.take_turn()
        self.task = torch._C._current_graph_task_id()
        self.runs += 1
        return self.runs

    def reassign_buckets(self, order: Sequence[int]) -> None:
        """Assign buckets in this order of readiness until a backward provides a better one."""
        self.order.start_over()
        self.launcher.forget_order()
        self.replicas.clear()
        self._make_buckets(order)
        if self.state is BackwardState.EXPECTED:
            self.prepare_buckets()

    def rebuild_once(self) -> None:
        """Make buckets final after the first reduced backward, in its order unless that is off."""
        order = self.order
        if not order.complete:
            return
        order.rebuilt = order.rebuild
        if order.rebuild:
            self._make_for_good(self.launcher.receive_order())
            self.domain.raise_deferred()  # an error reported during the broadcast
        elif self.usage.static:
            self._make_for_good(self.assigner.first_order())  # without the unused parameters
        else:
            order.settle()

    def _make_for_good(self, order: Sequence[int]) -> None:
        self._clear()
        self.order.settle()
        self.launcher.forget_order()
        never = self.usage.unused if self.usage.static else frozenset()
        self._make_buckets([i for i in order if i not in never])

    def _make_buckets(self, order: Sequence[int]) -> None:
        self.assigner.counts = self.usage.counts
        self.buckets.make(order, with_hook=self.launcher.hook is not None)

    def take_turn(self) -> None:
        """Send after the reducers that already have a position in this backward.

        If parameters may be left out, positions follow the order in which backward reaches the
        outputs: a gradient from the loss may arrive before them on one rank and after them on
        another.
        """
        with self.domain.lock:
            others = self.others()
            self.turn.take([b for b in others if b.running and b.turn.taken] if others else ())

    def give_turn_up(self) -> None:
        """Let no other reducer wait for this one, which sends nothing more in this backward."""
        self.turn.predecessors.clear()
        for other in self.others():
            other.turn.predecessors.discard(self)

    # -- end -------------------------------------------------------------------------------

    def sending_last(self, *, sent: bool = False) -> None:
        """Record that the backward's last message is about to be sent, or was sent."""
        self.end = self.domain.log.position() + (not sent)
        self.transition(Event.SEND_LAST)

    def tally(self) -> Tally:
        """Return this rank's summands in this backward: weights and counts of forwards."""
        return self.weights.tally(*self.forwards.count())

    def commit(self, used: Sequence[int], *, joined: bool = False) -> None:
        """Record that the gradients hold the reduced values.

        Args:
            used: Parameters that a rank used.
            joined: True if this rank took part by `shadow`.
        """
        self.domain.log.forget(self.end)
        if self.order.finish() and self.order.rebuild:
            # sent now: all ranks end the reducers of a backward in one order, while their next
            # forwards may run in different orders, where ranks would wait in a circle
            self.launcher.start_order(self.order.with_others(self.assigner.first_order()))
        if self.usage.recording:
            self.usage.record(used)
        self.weights.clear()
        self.forwards.commit()
        self.replicas.send(self.launcher, self.forwards, joined=joined or self.shadowed)
        self.transition(Event.COMMIT)
        try:
            self.launcher.committed()
        finally:  # the backward has ended all the same, and the next one starts from a clear state
            self._clear()

    def interrupt(self) -> None:
        """Abort the running backward after an exception, unless it was already handled.

        Sends nothing: `FaultDomain.report_interrupted` reports it at the next forward.
        """
        if Event.INTERRUPT in TRANSITIONS[self.state]:
            self.transition(Event.INTERRUPT)
            self.buckets.take_back()
            self._give_up_gradients()
            self.domain.note_interrupted()
            # gradients may be zeroed in place before the ranks are resynchronized
            for launched in self.launcher.launched:
                launched.bucket.move_out()

    def raise_not_finalized(self) -> NoReturn:
        """Raise on every rank because the previous backward was not finalized."""
        self.domain.fail(
            ReductionError(
                "the previous backward pass was not finalized: with "
                "require_manual_backward_finalization, call finalize_backward() once for each "
                "backward that is reduced"
            )
        )

    def raise_if_unfinished(self) -> None:
        """Raise if the previous backward did not end, or get the other ranks out of it.

        Raises:
            ReductionError: Parameters got no gradient in it, or it was not finalized.
            DistributedError: Errors of `FaultDomain.raise_deferred`.
        """
        if self.running:
            self.interrupt()
        if self.awaits_finalization:
            self.raise_not_finalized()
        self.domain.report_interrupted()
        self.domain.raise_deferred()
        if self.state is not BackwardState.SHORT:
            return
        short = [b for b in (self, *self.others()) if b.state is BackwardState.SHORT]
        lacking = [b.names[i] for b in short for i in sorted(b.buckets.missing())]
        self.domain.fail(
            ReductionError(
                f"parameters {lacking} got no gradient in the previous backward pass, so that "
                "nothing was reduced: make every output of the module take part in the loss, set "
                "find_unused_parameters=True, or requires_grad=False on those parameters",
                lacking,
            )
        )

    def reset(self) -> None:
        """Discard the running backward."""
        # gradients accumulated after an exception on this rank belong to the next backward
        if self.state.unfinished and not self.state.interrupted:
            self._give_up_gradients()
        self.transition(Event.RESET)
        self._clear()

    def _give_up_gradients(self) -> None:
        """Forget accumulated gradients, which will not be reduced."""
        self.weights.clear()
        self.usage.touched.clear()

    def start_over(self) -> None:
        """Return to the initial state: ranks may have had different assignments of buckets."""
        self.reset()
        self.shadowed = False  # the waiting rank has raised an error
        self.usage.forget()
        self.forwards.clear()
        self.replicas.backwards = 0
        self.reassign_buckets(self.assigner.first_order())

    def _clear(self) -> None:
        """Forget arrived gradients and buckets in flight."""
        self.had_undefined = self.takes_part = self.parked = False
        self.launcher.launched.clear()
        self.launcher.scale = None
        self.give_turn_up()
        self.order.clear()
        self.buckets.reset()
