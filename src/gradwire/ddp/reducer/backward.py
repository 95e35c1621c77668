"""The state of one reducer's backward: what prepares it, commits it and resets it.

The modules beside it change what is here: `arrival` (what autograd calls), `launch_order` (which
bucket is sent when) and `finalize` (waiting for the buckets, putting results into gradients). None
of them is imported here.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import NoReturn, cast

from torch import Tensor
from torch.distributed import ProcessGroup

from gradwire.ddp.buckets.assignment import BucketAssigner
from gradwire.ddp.buckets.bucket_set import BucketSet
from gradwire.ddp.faults.backward_state import TRANSITIONS, BackwardState, Event, after
from gradwire.ddp.faults.fault_domain import FaultDomain
from gradwire.ddp.faults.waiting import InFlight
from gradwire.ddp.reducer.forwards import Forwards
from gradwire.ddp.reducer.in_backward import detach_optimizer_hooks
from gradwire.ddp.reducer.launch import Launcher
from gradwire.ddp.reducer.log import StepTimer
from gradwire.ddp.reducer.tally import Tally
from gradwire.ddp.reducer.usage import Usage
from gradwire.ddp.reducer.weights import Weights
from gradwire.errors import MismatchError, ReductionError

__all__ = ["Backward"]


class Backward:
    """Which gradients have arrived, what is in flight, and what earlier backwards have shown.

    Args:
        assigner: Makes the buckets.
        usage: Which parameters a backward uses.

    Attributes:
        buckets: The buckets, in the order of launch.
        launcher: Sends buckets, and has those that are in flight.
        domain: The fault domain of the group, shared with its other reducers.
        timer: When what happened in this step.
        state: Where the backward is.
        end: The position of its last message in the group's log, while COMMITTING or UNDECIDED.
        step: How many backwards were prepared on this rank.
        runs: How many backwards have begun: the callback of an earlier one is recognized by it.
        task: Autograd's number of the running backward.
        has_turn: Whether its turn among the reducers that share the running backward is known.
        predecessors: The group's reducers whose turn in the same backward is earlier: their buckets
            go first.
        parked: True from its end in autograd until the reducers of other groups that share the
            backward have come to theirs.
        arrivals: Indices of parameters as their gradients come in this backward; None once buckets
            are as they stay.
        to_rebuild: True from the end of the first backward that was reduced until buckets are made
            for good.
        had_undefined: Whether autograd passed a parameter no gradient.
        takes_part: Whether the backward is this rank's part even if no parameter gets a gradient.
        ranks: How many ranks gradients are divided by.
        skip_unused: Whether buckets are skipped that are unused.
        rebuild: Whether buckets are assigned again after the first backward.
        has_rebuilt: Whether they were.
        manual: Whether a backward ends with `finalize_manually` instead of by itself.
        unused_here: Names of what was unused on this rank in the last one.
        weights: What gradients weigh.
        reword: Makes of an error of unexpected gradients the one that is raised on all ranks.
        shadowed: Whether a rank takes part by `shadow`, and waits for one backward.
        local: How many backwards run of forwards under `no_sync`, while another one is expected.
        came_local: Parameters that got a gradient in these.
        optimized: Parameters whose optimizers step during backward.
        forwards: Forwards whose backward is reduced, and those of them that had none.
        unverified: How many were reduced since replicas were compared: the same on all ranks.
        replica: Returns what is to be sent to compare replicas, or None if it is not time to.
        prepare_late: Prepares a backward that reaches parameters without a forward that did so: one
            ran in a transform of `torch.func`, whose results may have a backward or not.
    """

    def __init__(self, assigner: BucketAssigner, usage: Usage) -> None:
        self.assigner, self.usage = assigner, usage
        self.names, self.parameters = assigner.names, assigner.parameters
        self.buckets, self.timer = BucketSet(assigner), StepTimer()
        self.state, self.end, self.runs = BackwardState.LOCAL, 0, 0
        self.task, self.has_turn, self.parked = -1, True, False
        self.predecessors: set[Backward] = set()
        self.arrivals: list[int] | None = []
        self.to_rebuild = False
        self.had_undefined = self.takes_part = False
        self.skip_unused = self.manual = self.rebuild = self.has_rebuilt = False
        self.shadowed = False
        self.unused_here: tuple[str, ...] = ()
        self.reword: Callable[[ReductionError], ReductionError | None] | None = None
        self.forwards = Forwards()
        self.unverified = 0
        self.replica: weakref.WeakMethod[Callable[[], Tensor | None]] | None = None
        self.local, self.came_local = 0, list[int]()
        self.prepare_late: weakref.WeakMethod[Callable[[], None]] | None = None
        self.weights = Weights(assigner.parameters, usage.nodes, assigner.ownership)
        self.detach_optimizers()
        self.set_group(assigner.group)
        self._make_buckets(assigner.first_order())

    def detach_optimizers(self) -> None:
        """Take over the steps of optimizers that would step in backward, by local gradients."""
        self.optimized = detach_optimizer_hooks(self.parameters)

    def set_group(self, group: ProcessGroup) -> None:
        """Communicate over a group from now on, without a hook."""
        self.group = self.assigner.group = group
        self.ranks = group.size()
        self.step = 0
        self.domain = FaultDomain.of(group)
        self.domain.participants.add(self)
        self.weights.fail = self.domain.fail
        self.launcher = Launcher(group, self.domain, self)

    # -- where it is -----------------------------------------------------------------------

    @property
    def running(self) -> bool:
        """Whether autograd is in it."""
        return self.state in (BackwardState.RUNNING, BackwardState.RUNNING_AGAIN)

    @property
    def unfinished(self) -> bool:
        """Whether a backward began, and did not end with everything reduced."""
        return self.state not in (
            BackwardState.LOCAL,
            BackwardState.EXPECTED,
            BackwardState.REDUCED,
            BackwardState.FINALIZED,
        )

    @property
    def interrupted(self) -> bool:
        """Whether an exception ended it here, and the ranks are not in step again."""
        return self.state in (BackwardState.INTERRUPTED, BackwardState.UNDECIDED)

    @property
    def awaits_finalization(self) -> bool:
        """Whether a backward has ended that its caller has yet to finalize."""
        return self.manual and self.state in (BackwardState.AWAITING, BackwardState.COMMITTING)

    @property
    def untouched(self) -> bool:
        """Whether it is a backward of other things than parameters, as far as is known."""
        return self.buckets.untouched and not (self.had_undefined or self.takes_part)

    def transition(self, event: Event) -> None:
        """Go on to the state that follows."""
        self.state = after(self.state, event)

    def others(self) -> Sequence[Backward]:
        """The backwards of the group's other reducers."""
        return cast("Sequence[Backward]", self.domain.participants.others(self))

    def elsewhere(self) -> Sequence[Backward]:
        """Return the backwards of reducers of this process's other groups."""
        return cast("Sequence[Backward]", self.domain.elsewhere())

    def sharing(self) -> list[Backward]:
        """Return the backwards of other groups that autograd runs together with this one."""
        return [b for b in self.elsewhere() if b.running and b.task == self.task]

    def in_flight(self) -> list[InFlight]:
        """What is in flight."""
        return self.launcher.in_flight()

    # -- before it -------------------------------------------------------------------------

    def prepare_for_backward(self, ranks: int | None) -> None:
        """Expect the backward of a forward; `ranks` as `prepare_buckets` has it."""
        self.step += 1
        self.prepare_late = None
        self.timer.start()
        self.transition(Event.PREPARE)
        self.prepare_buckets(ranks)

    def prepare_buckets(self, ranks: int | None = None) -> None:
        """Expect gradients; `ranks` are to be divided by, if not as many as the last time."""
        self.buckets.finish_making()
        self.ranks = ranks or self.ranks
        self.launcher.correction = ratio = self.group.size() / self.ranks
        if self.usage.recording:
            self.buckets.defer(until_the_end=True)
        if ratio != 1.0 and self.launcher.hook is None:
            for bucket in self.buckets:
                bucket.scale *= ratio

    def reassign_buckets(self, order: Sequence[int], *, keep_state: bool = True) -> None:
        """Assign buckets for this order of readiness, until a backward has shown a better one."""
        self.arrivals, self.to_rebuild = [], False
        self.launcher.forget()
        self._make_buckets(order, keep_state=keep_state)
        if self.state is BackwardState.EXPECTED:
            self.prepare_buckets()

    def rebuild_once(self) -> None:
        """After the first backward that was reduced: assign buckets in its order, or never."""
        if not self.to_rebuild:
            return
        self.has_rebuilt = self.rebuild
        if self.rebuild:
            self._make_for_good(self.launcher.receive_order())
            self.domain.raise_deferred()  # an error that was reported during the broadcast
        elif self.usage.static:
            self._make_for_good(self.assigner.first_order())  # by what the first one has shown
        else:
            self.arrivals, self.to_rebuild = None, False

    def _make_for_good(self, order: Sequence[int]) -> None:
        self._clear()
        self.arrivals, self.to_rebuild = None, False
        self.launcher.forget_order()
        never = self.usage.unused if self.usage.static else frozenset()
        self._make_buckets([i for i in order if i not in never])

    def _make_buckets(self, order: Sequence[int], *, keep_state: bool = True) -> None:
        self.assigner.counts = self.usage.counts
        state = self.launcher.state if keep_state else None
        self.buckets.make(order, with_hook=self.launcher.hook is not None, state=state)

    def take_turn(self) -> None:
        """Send after the reducers that have a turn in this backward already.

        Where parameters may be left out, turns go by the order in which backward reaches the
        outputs: a gradient may come before them on one rank, from the loss, and after them on
        another.
        """
        with self.domain.lock:
            self.has_turn = True
            self.predecessors |= {b for b in self.others() if b.running and b.has_turn}

    def give_turn_up(self) -> None:
        """It sends nothing more in this backward: no other reducer is to wait for it."""
        self.predecessors.clear()
        for other in self.others():
            other.predecessors.discard(self)

    # -- its end ---------------------------------------------------------------------------

    def sending_last(self) -> None:
        """The backward's last message is about to be sent."""
        self.end = self.domain.position() + 1
        self.transition(Event.SEND_LAST)

    def tally(self) -> Tally:
        """Return the numbers that this rank adds to those of the others in this backward."""
        return self.weights.tally(*self.forwards.count())

    def check_in_step(self, sums: Tally) -> None:
        """Raise on every rank if the ranks' gradients are those of different steps.

        Raises:
            MismatchError: Names each rank and how many of its forwards had no backward.
        """
        if sums.in_step:
            return
        counts = self.domain.exchange("skipped forwards", self.forwards.count()[0])
        held = "; ".join(f"rank {r}: {n}" for r, n in enumerate(counts or ()))
        self.domain.fail(
            MismatchError(
                "gradients of different steps meet: ranks have called forward, and then not "
                f"backward, different numbers of times: {held or 'not known'}. Call backward after "
                "each forward on every rank, or leave a batch out on all ranks (skip_if_any); call "
                "a forward that has no backward under torch.no_grad() or no_sync()"
            )
        )

    def commit(self, used: Sequence[int], *, joined: bool = False) -> None:
        """Gradients hold what was reduced; `joined` if this rank took part by `shadow`."""
        self.domain.committed(self.end)
        if self.arrivals is not None and not self.to_rebuild:
            self.to_rebuild = True
            if self.rebuild:
                # sent now, as all ranks end the reducers of a backward in one order, while their
                # next forwards may be in different orders: ranks would wait there in a circle.
                # What was left out of the backward comes last, in the first order
                order = dict.fromkeys([*self.arrivals, *self.assigner.first_order()])
                self.launcher.start_order([*order])
        if self.usage.recording:
            self.usage.record(used)
        self.weights.clear()
        self.forwards.commit()
        # replicas are compared while ranks are together: forwards may differ in number
        own = None if self.replica is None else self.replica()
        left = joined or self.shadowed  # who has run out of input has old parameters
        if own is not None and not left and (message := own()) is not None:
            self.launcher.start_digests(message)
            self.unverified = 0
        self.unverified += 1
        self.transition(Event.COMMIT)
        try:
            self.launcher.committed()
        finally:  # what it raises is not of the backward, which has ended: the next one begins anew
            self._clear()

    def keep_local(self) -> None:
        """Keep what is yet to be sent: another reducer of the same backward will write to it."""
        ownership, short = self.assigner.ownership, self.state is BackwardState.SHORT
        if ownership.shared and (self.running or short):
            waiting = self.buckets.after(len(self.launcher.launched) - 1)
            pending = {i for bucket in waiting for i in bucket.members}
            if short:
                pending -= set(self.buckets.missing())  # they are yet to come
            ownership.keep_local(self.parameters, pending, set(self.buckets.ready()))

    def interrupt(self) -> None:
        """An exception ends the running backward, if it has not been dealt with."""
        if Event.INTERRUPT in TRANSITIONS[self.state]:
            self.transition(Event.INTERRUPT)
            self.buckets.take_back()
            self._give_up_gradients()
            self.domain.note_interrupted()
            # they may be zeroed in place before the ranks are in step again
            for launched in self.launcher.launched:
                launched.bucket.move_out()

    def raise_not_finalized(self) -> NoReturn:
        """End the next backward on every rank, as the one before was left to be finalized."""
        self.domain.fail(
            ReductionError(
                "the backward before was not finalized: with require_manual_backward_finalization, "
                "call finalize_backward() once for each backward that is reduced"
            )
        )

    def recover(self) -> None:
        """Say why the backward before did not end, or bring the other ranks out of it.

        Raises:
            ReductionError: It left parameters without a gradient.
            DistributedError: As `FaultDomain.raise_deferred`.
        """
        if self.running:
            self.interrupt()
        if self.awaits_finalization:
            self.raise_not_finalized()
        self.domain.recover()
        self.domain.raise_deferred()
        if self.state is not BackwardState.SHORT:
            return
        short = [b for b in (self, *self.others()) if b.state is BackwardState.SHORT]
        lacking = [b.names[i] for b in short for i in sorted(b.buckets.missing())]
        self.domain.fail(
            ReductionError(
                f"parameters {lacking} got no gradient in the backward before, so that nothing "
                "was reduced: make every output of the module take part in the loss, set "
                "find_unused_parameters=True, or requires_grad=False on those parameters",
                lacking,
            )
        )

    def reset(self) -> None:
        """Give the running backward up."""
        # after an exception here, what has accumulated since is the next backward's
        if self.unfinished and not self.interrupted:
            self._give_up_gradients()
        self.transition(Event.RESET)
        self._clear()

    def _give_up_gradients(self) -> None:
        """What has accumulated will not be reduced."""
        self.weights.clear()
        self.usage.touched.clear()

    def start_over(self) -> None:
        """As after construction: ranks may have been at different assignments of buckets."""
        self.reset()
        self.shadowed = False  # who waited has raised an error
        self.usage.forget()
        self.forwards.clear()
        self.unverified = 0
        self.reassign_buckets(self.assigner.first_order())

    def _clear(self) -> None:
        """Nothing has arrived, nothing is in flight."""
        self.had_undefined = self.takes_part = self.parked = False
        self.launcher.launched.clear()
        self.launcher.scale = None
        self.assigner.ownership.clear()
        self.give_turn_up()
        if self.arrivals is not None:
            self.arrivals.clear()
        self.buckets.reset()
