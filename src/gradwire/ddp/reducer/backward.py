"""One reducer's backward: it begins, gradients arrive, buckets are launched, and it ends.

Autograd calls `Backward.reach_output` where a backward begins, `on_gradient` once for each
parameter, which is the hot path, and `Backward.on_end` when it has run all of it. When all
gradients of a bucket have arrived, the bucket is launched. The end waits for the buckets and writes
their results to the gradients. Either all ranks receive the same results, or none does: the last
message serves as the vote.

Buckets are launched in the order of the `BucketSet`, the same on every rank, also across a group's
reducers: if two buckets were launched in different orders on two ranks, one would be summed with
the other. The order is derived from one of parameters that all ranks share: the reverse of their
registration, and after the first backward the order in which rank 0's gradients became ready. The
last bucket is held back until backward has ended, because its message is the vote.

Reducers of other groups may share the backward, and ranks may reach them in different orders.
Therefore nothing waits for other ranks before the backward has ended. The groups are then finished
one after the other, in the order of their names, which is the same on all ranks.
"""

from __future__ import annotations

import math
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from gradwire._scope import runs_outside_contexts
from gradwire._torch import in_compiled_autograd, run_as_written
from gradwire.ddp.arguments import WeakHook, remove_hooks
from gradwire.ddp.buckets.assignment import BucketSet
from gradwire.ddp.buckets.bucket import Bucket, SparseBucket
from gradwire.ddp.buckets.ownership import is_zero
from gradwire.ddp.faults.fault_domain import FaultDomain
from gradwire.ddp.faults.protocol import TRANSITIONS, BackwardState, Event, after
from gradwire.ddp.reducer.launch import GradientStreams, Launched, Launcher
from gradwire.ddp.reducer.weights import NO_BUCKET, NOT_SENT, Forwards, Tally, Usage, Weights
from gradwire.errors import ArgumentError, MismatchError, NotSupportedError, ReductionError
from gradwire.recorder import is_users, record_error, ring

# module-level names: an enum lookup is slower, and every gradient compares its state with them
RUNNING, RUNNING_AGAIN = BackwardState.RUNNING, BackwardState.RUNNING_AGAIN
EXPECTED, SHORT = BackwardState.EXPECTED, BackwardState.SHORT

NOT_STATIC = "static_graph=True, and parameters got fewer gradients than in the first backward"

IN_BACKWARD = "torch.distributed.optim.apply_optimizer_in_backward"
"""PyTorch's module whose hooks step a parameter's optimizer when its local gradient is ready."""


@dataclass
class StepTimer:
    """Times of the events in a step, in ns, as in PyTorch's reducer; 0 before the event."""

    forward_start: int = 0
    compute_start: int = 0
    compute_end: int = 0
    comm_start: int = 0
    comm_end: int = 0
    # number of buckets that had anything to send
    sent: int = 0
    # time that the end of the backward waited for each bucket
    waits: list[int] = field(default_factory=list)
    # names of the parameters unused on this rank
    unused_here: tuple[str, ...] = ()


class Backward:
    """State of one reducer's backward: gradients that have arrived, and buckets in flight."""

    def __init__(self, bucket_set: BucketSet, usage: Usage) -> None:
        self.bucket_set, self.usage = bucket_set, usage
        self.names, self.parameters = bucket_set.names, bucket_set.parameters
        self.timer, self.streams = StepTimer(), GradientStreams(self.parameters)
        self.state = BackwardState.LOCAL
        self.end = 0  # last message's position in the group's log, while COMMITTING or UNDECIDED
        self.step = 0  # number of backwards prepared on this rank
        self.runs = 0  # backwards that have begun; identifies the callback of an earlier one
        self.task = -2  # autograd's id of the last backward to begin; -1 is none's
        # position among the group's reducers that share the running backward: predecessors send
        # their buckets first
        self.has_turn = True
        self.predecessors: set[Backward] = set()
        # from its end in autograd until all reducers of other groups that share it reach theirs
        self.parked = False
        # parameters in the order in which their gradients arrive; None once buckets are final
        self.arrivals: list[int] | None = []
        self.had_undefined = False  # autograd passed None instead of a parameter's gradient
        self.takes_part = False  # counts as this rank's even if no parameter gets a gradient
        self.manual = bucket_set.options.manual_finalization  # ended by `finalize`, not by itself
        # shadowed: a rank takes part by `shadow`, and waits for one backward
        self.skip_unused = self.shadowed = False
        # of the wrapper, if there is one: converts an error of an unexpected gradient
        self.reword: Callable[[ReductionError], ReductionError | None] = WeakHook()
        self.forwards = Forwards()
        # what the wrapper sends to compare replicas: the message if one is due, the sum of the last
        # backward's, and the number of backwards since, the same on all ranks
        self.replica_message: Callable[[Forwards], Tensor | None] = WeakHook()
        self.replica_sum: tuple[Tensor, Work] | None = None
        self.since_replicas = 0
        # running backwards of forwards under `no_sync`, while another one is expected, and the
        # gradients that came meanwhile: they may belong to either
        self.local_running = 0
        self.local_arrivals: list[int] = []
        # prepares a backward that no forward of the wrapper announced; not True if it stays local
        self.prepare_around: Callable[[], bool | None] = WeakHook()
        self.where = ""  # the program's line of such a backward while it runs
        self.weights = Weights(self.parameters, usage.nodes)
        self.detach_optimizers()
        self.set_group(bucket_set.group)
        self._make_buckets(bucket_set.first_order())

    def set_group(self, group: ProcessGroup) -> None:
        """Communicate over a group from now on, without a communication hook."""
        self.group = self.bucket_set.group = group
        self.ranks = group.size()  # divisor of the gradients
        self.step = 0
        self.domain = FaultDomain.of(group)
        self.domain.participants[id(self)] = self
        self.weights.fail = self.domain.fail
        self.launcher = Launcher(group, self.domain, self)

    # -- state -----------------------------------------------------------------------------

    @property
    def running(self) -> bool:
        """True while autograd runs the backward."""
        return self.state in (RUNNING, RUNNING_AGAIN)

    @property
    def awaits_finalization(self) -> bool:
        """True if a backward has ended that the caller has not finalized yet."""
        return self.manual and self.state in (BackwardState.AWAITING, BackwardState.COMMITTING)

    @property
    def untouched(self) -> bool:
        """True if the backward has reached none of the parameters so far."""
        if self.had_undefined or self.takes_part:
            return False
        return not any(bucket.ready for bucket in self.bucket_set)

    @property
    def all_launched(self) -> bool:
        """True if all buckets have been launched."""
        return len(self.launcher.launched) >= len(self.bucket_set)

    @property
    def has_only_last_left(self) -> bool:
        """True if all buckets but the last have been launched."""
        # read without the lock: the list only grows while autograd runs, and `_launch_ready` checks
        # it again
        return self.all_launched or self._is_last(len(self.launcher.launched))

    def transition(self, event: Event) -> None:
        """Change to the state that follows an event."""
        self.state = after(self.state, event)

    def others(self) -> Sequence[Backward]:
        """Return the backwards of the group's other reducers."""
        return self.domain.participants.others(self)

    def _sharing(self) -> list[Backward]:
        """Return the backwards of other groups that run in the same backward of autograd."""
        elsewhere = self.domain.elsewhere()
        return [b for b in elsewhere if b.running and b.task == self.task] if elsewhere else []

    # -- optimizers that step during backward ------------------------------------------------

    def detach_optimizers(self) -> None:
        """Take over from optimizers that would step during backward with local gradients."""
        handles = getattr(sys.modules.get(IN_BACKWARD), "param_to_optim_hook_handle_map", {})
        if not handles and self.step > 1:  # optimizers without hooks come before the first step
            return
        self.optimized = [p for p in self.parameters if hasattr(p, "_in_backward_optimizers")]
        for parameter in self.optimized:  # out of PyTorch's map, too, which then has only new ones
            remove_hooks(handles.pop(parameter, ()))

    # -- preparation -----------------------------------------------------------------------

    def prepare_buckets(self, ranks: int | None = None) -> None:
        """Expect gradients, to be divided by `ranks`; None keeps the last divisor."""
        self.bucket_set.finish_making()
        self.ranks = ranks or self.ranks
        self.launcher.correction = ratio = self.group.size() / self.ranks
        if self.usage.recording:
            for bucket in self.bucket_set:  # this backward counts how often gradients arrive
                bucket.defer()
                bucket.expected = math.inf
        if ratio != 1.0 and self.launcher.hook is None:
            for bucket in self.bucket_set:
                bucket.scale *= ratio

    def reassign_buckets(self, order: Sequence[int]) -> None:
        """Assign buckets in this order of readiness until a backward provides a better one."""
        self.arrivals, self.launcher.order, self.replica_sum = [], None, None
        self._make_buckets(order)
        if self.state is EXPECTED:
            self.prepare_buckets()

    def rebuild_once(self) -> None:
        """Make buckets final after the first reduced backward, in rank 0's order."""
        if self.launcher.order is None:
            return
        order = self.launcher.receive_order()
        self._clear()
        self.arrivals = self.launcher.order = None
        never = self.usage.unused if self.usage.static else frozenset()
        self._make_buckets([i for i in order if i not in never])
        self.domain.raise_deferred()  # an error reported during the broadcast

    def _make_buckets(self, order: Sequence[int]) -> None:
        self.bucket_set.counts = self.usage.counts
        self.bucket_set.make(order, with_hook=self.launcher.hook is not None)

    # -- begin -------------------------------------------------------------------------------

    def reach_output(self, forward: int) -> None:
        """Begin a backward at an output: the first one after the forward, or a later one."""
        self.forwards.reach(forward)
        if self.running:
            if not self.launcher.launched:  # gradients from beside the output came before it
                self._go_through()
            self.take_turn()
        if self.running or self.state in (BackwardState.LOCAL, BackwardState.FINALIZED):
            return
        # a static graph's second backward begins with other buckets
        if self.state is BackwardState.REDUCED and self.usage.static and self.arrivals is not None:
            if not self.usage.reaches_parameters():
                return  # torch.autograd.grad sends nothing: perhaps only this rank calls it
            with torch.no_grad():
                self.rebuild_once()
        self._begin()

    def _begin(self, index: int | None = None, incoming: Tensor | None = None) -> None:
        """Begin a backward at its first gradient, of a parameter or of an output."""
        with self.domain.lock:  # autograd runs one thread per device
            if self.running:
                return
            if self.awaits_finalization:
                self.raise_not_finalized()
            self.domain.report_interrupted()
            self.domain.poll_known(self)
            if in_compiled_autograd():  # does not run callbacks at the end of a backward
                text = (
                    "backward() under torch's compiled autograd: its gradients would not be "
                    "reduced. Call it outside, or use PyTorch's own DistributedDataParallel with "
                    "torch._dynamo.config.optimize_ddp = 'python_reducer'"
                )
                self.domain.fail(NotSupportedError(text))
            self.detach_optimizers()  # attached after the forward
            if self.state is BackwardState.REDUCED:
                self.step += 1
                self.transition(Event.BEGIN_AGAIN)
                self.prepare_buckets()
            else:
                self.transition(Event.BEGIN)
            self.bucket_set.ownership.begin(self.parameters, index, incoming)
            self.has_turn = False
            if index is None or not self.usage.find_unused or not self.others():
                self.take_turn()
            self.task = torch._C._current_graph_task_id()
            self.runs += 1
            end = _EndOfBackward(self, self.runs)
            torch.autograd.Variable._execution_engine.queue_callback(end)
        self.timer.compute_start = self.timer.compute_start or perf_counter_ns()
        if torch.is_grad_enabled():
            for bucket in self.bucket_set:
                bucket.defer(with_graph=True)
        if self.usage.find_unused:
            self._mark_unused(at_output=index is None)
        # gradients of a forward under `no_sync` in the same loss, which arrived first
        came, self.local_arrivals = self.local_arrivals, []
        for i in came:
            on_gradient(weakref.ref(self), i, None, (self.parameters[i].grad,))

    def _mark_unused(self, *, at_output: bool) -> None:
        """Mark the parameters that the graph does not reach as unused."""
        # If it reaches none, wait until the backward has ended: a reentrant checkpoint builds its
        # graph during backward, and may reach some.
        unused = self.usage.unused_in_graph()
        if unused is None:
            return
        used = len(unused) < len(self.parameters)
        if used:
            self.bucket_set.mark_unused(unused)
        if at_output and any(p.requires_grad for p in self.parameters):
            # all gradients may have arrived before that of the output, from the loss, or none may
            # come
            self.takes_part = used or self.usage.runs_all()

    def take_turn(self) -> None:
        """Send after the reducers that already have a position in this backward, if it has none."""
        # If parameters may be left out, positions follow the order in which backward reaches the
        # outputs: a gradient from the loss may arrive before them on one rank and after them on
        # another.
        if self.has_turn:
            return
        with self.domain.lock:
            self.has_turn = True
            self.predecessors.update(b for b in self.others() if b.running and b.has_turn)

    def _give_turn_up(self) -> None:
        """Let no other reducer wait for this one, which sends nothing more in this backward."""
        self.predecessors.clear()
        for other in self.others():
            other.predecessors.discard(self)

    # -- gradients ---------------------------------------------------------------------------

    @runs_outside_contexts
    def admit(self, index: int, incoming: tuple[Any, ...]) -> bool:
        """Begin a backward at a parameter's gradient; return False if the gradient stays local."""
        defined = incoming[0] is not None and self.parameters[index].requires_grad
        reduced = not (self.weights.within or self.local_running)
        if reduced and self.state not in (EXPECTED, SHORT):
            reduced = defined and self._prepare_around()
        if not defined:
            return reduced
        if reduced:
            self._begin(index, incoming[0])
        else:  # the next backward adds to it
            if self.local_running:
                self.local_arrivals.append(index)
            self.usage.touched.add(index)
            self.bucket_set.ownership.make_private(self.parameters[index], incoming)
        return reduced

    def _prepare_around(self) -> bool:
        """Prepare for a backward whose forward went around the wrapper, unless it stays local."""
        with self.domain.lock, torch.no_grad():
            if self.running or self.state is EXPECTED:  # by another of autograd's threads
                return True
            # what arrives in a backward after an error or `finalize` does not begin another one
            if self.task == torch._C._current_graph_task_id() or not self.prepare_around():
                return False
            self.where = f"rank {self.group.rank()} at {users_line()}"
            self.launcher.note = f", in a backward around the wrapper, {self.where}"
            self.forwards.go_around()
            if self.launcher.last_bucket_votes and self.bucket_set.weights_bucket is None:
                self.transition(Event.SKIP)
                why = NO_BUCKET if self.launcher.hook is None else NOT_SENT
                self.domain.fail(NotSupportedError(f"{why}{self.launcher.note}"))
        return True

    @runs_outside_contexts
    def mark_undefined(self, index: int) -> None:
        """Handle an undefined gradient: the parameter's node ran, but received None."""
        if not self.running:
            self._begin(index)
        if self.arrivals is not None:
            self.arrivals.append(index)
        self.had_undefined = True
        bucket = self.bucket_set.of[index]
        bucket.mark_unused([index])
        if bucket.all_ready:
            self.on_bucket_ready(bucket)

    @runs_outside_contexts
    def on_bucket_ready(self, bucket: Bucket) -> None:
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
            self.domain.fail(self.reword(error) or error)
        if not self.has_only_last_left:
            with torch.no_grad():
                self._launch_in_order(final=False)

    def _go_through(self) -> None:
        self.where = self.launcher.note = ""
        self.forwards.around = 0

    # -- launch ------------------------------------------------------------------------------

    def _launch_in_order(self, *, final: bool, ended: bool = False) -> None:
        """Launch each ready bucket whose predecessors were launched; the last only if `final`."""
        # Reducers that share a backward launch one after the other, and so do their last buckets at
        # the end: a gradient missing on one rank must not make buckets of two reducers meet. The
        # last bucket is the vote: an earlier failure keeps it from being sent, so that no rank
        # takes the result.
        # once backward has ended, this may wait for other ranks
        ended = ended or final
        if not self.has_turn or not all(b.has_only_last_left for b in self.predecessors):
            return
        self._launch_ready(final=final, ended=ended)
        if not final and self.has_only_last_left:
            for other in self.others():
                if self in other.predecessors:  # may have waited for this one alone
                    other._launch_in_order(final=False, ended=ended)

    def _launch_ready(self, *, final: bool, ended: bool) -> None:
        """Fill and launch the next buckets, up to the first one that is not ready."""
        buckets, launched, domain = self.bucket_set, self.launcher.launched, self.domain
        if not ended and not domain.channel.name and self._may_share():
            return
        # autograd runs one thread per device: only one at a time selects and launches the next
        # bucket
        with domain.lock:
            domain.poll_known(self)  # nothing is sent while ranks resynchronize
            domain.connect()
            # Ranks that have run out of input take part in the first backward of a forward only.
            # Then they wait for the next forward, and do not resynchronize before it. As nothing
            # was sent, ranks stay in step.
            if self.shadowed and self.state is RUNNING_AGAIN:
                self.reset()
                error = ReductionError(
                    "a second backward of one forward in join(), for which ranks that have run out "
                    "of input do not wait: run one backward of the sum of the losses"
                )
                record_error(error)
                raise error
            while len(launched) < len(buckets):
                bucket = buckets[len(launched)]
                is_last = self._is_last(len(launched))
                if not ended and self._waits(bucket) and self._may_share():
                    return
                # Functions of `collectives` are called where backward reaches them, which must be
                # before or after a bucket on all ranks: an unused one may be ready earlier.
                if not ended and self.usage.differs and domain.has_collectives:
                    return
                if not bucket.all_ready or (is_last and not final):
                    return
                if self._skips(bucket):
                    launched.append(Launched(bucket))
                    continue
                record = ring.begin_bucket(self.group, self.step, len(launched), bucket.names)
                if self.streams.join(bucket.parameters[0].device):
                    bucket.record_use_of_gradients()
                try:
                    bucket.copy_in()
                except (ReductionError, NotSupportedError) as refused:
                    domain.fail(refused)
                if bucket.extra_numel:
                    self.tally().write(bucket.extra)
                self.timer.comm_start = self.timer.comm_start or perf_counter_ns()
                before = 0 if record is None else domain.log.position()
                if record is not None:
                    record.packed = perf_counter_ns()
                    ring.check_bucket(record, bucket.parameters)
                self._launch_filled(bucket, is_last=is_last)
                if record is not None:
                    record.sent = perf_counter_ns()
                    record.nbytes = 0 if isinstance(bucket, SparseBucket) else bucket.flat.nbytes
                    record.first, record.last = before + 1, domain.log.position()
                    launched[-1].record = record

    def _launch_filled(self, bucket: Bucket, *, is_last: bool) -> None:
        """Launch a bucket whose buffer is filled. If it is the vote, the backward is COMMITTING."""
        if self.launcher.scale is None:
            self._agree_on_scale()
        launcher = self.launcher
        votes = is_last and launcher.last_bucket_votes
        votes = votes and not (self.usage.allows_unused or self.where)
        if votes and launcher.hook is not None:
            before = self.domain.log.position()
            launcher.launch(bucket, is_last=is_last)
            if self.domain.log.position() > before:  # not if the hook sent it in another group
                self._sending_last(sent=True)
            return
        # a sparse bucket may need a second message: `_receive` counts it once that is sent
        if votes and not isinstance(bucket, SparseBucket):
            launcher.send_rest()
            self._sending_last()
        launcher.launch(bucket, is_last=is_last)

    def _agree_on_scale(self, own: Tally | None = None) -> None:
        """Set the factor of a hook's buckets, before the first one is launched."""
        launcher, factor = self.launcher, None
        if launcher.hook is not None and not launcher.hook.linear and launcher.sums_numbers:
            sums, work = launcher.start_sum((self.tally() if own is None else own).message())
            launcher.wait_small(work)
            factor = self.weights.factor(Tally.read(sums), self.ranks)
        launcher.scale = launcher.correction * (1.0 if factor is None else factor)

    def _waits(self, bucket: Bucket) -> bool:
        """Return True if the launch of a bucket may wait for other ranks."""
        future, hook = self.domain.hook_future, self.launcher.hook
        if future is not None and not future.done():  # perhaps that of another reducer's hook
            return True
        if hook is None:
            return False
        asks = self.launcher.scale is None and self.launcher.sums_numbers and not hook.linear
        return isinstance(bucket, SparseBucket) or asks

    def _may_share(self) -> bool:
        """Return True if reducers of other groups may take part in the running backward."""
        # those that a repeated backward has not reached yet were reduced by the one before
        due = BackwardState.REDUCED if self.state is RUNNING_AGAIN else EXPECTED
        return any(b.running or b.state in (EXPECTED, due) for b in self.domain.elsewhere())

    def _is_last(self, index: int) -> bool:
        """Return True if no bucket after this one has anything to send."""
        if not self.skip_unused:
            return index + 1 == len(self.bucket_set)
        return all(map(self._skips, [*self.bucket_set][index + 1 :]))

    def _skips(self, bucket: Bucket) -> bool:
        """Return True if nothing is sent for a bucket, which no rank has used."""
        accumulated = not self.usage.touched.isdisjoint(bucket.members)
        return self.skip_unused and len(bucket.unused) == len(bucket.members) and not accumulated

    def check_over(self) -> None:
        """Raise if ranks wait for this backward. Called before other communication."""
        # Backwards of the group's other modules count, as in `Join([generator, discriminator])`: a
        # rank that has run out of input takes part in the forward and the backward of one module,
        # then in those of the next.
        shadowed = [b for b in (self, *self.others()) if b.shadowed]
        if any(b.state is BackwardState.AWAITING for b in shadowed):
            self.raise_not_finalized()
        if any(b.state in (EXPECTED, SHORT) for b in shadowed):
            self.raise_if_unfinished()
            self.domain.fail(
                ReductionError(
                    "a forward in join() had no backward, for which ranks that have run out of "
                    "input wait: run it under no_sync() or torch.no_grad(), or its backward first"
                )
            )

    # -- end ---------------------------------------------------------------------------------

    @runs_outside_contexts
    def on_end(self, run: int) -> None:
        """End the backward with this number: autograd has run all of it."""
        if self.state is BackwardState.FINALIZED and run == self.runs:  # in one of its hooks
            self.transition(Event.END_UNTOUCHED)
            return
        if run != self.runs or not self.running:
            self.domain.poll_known(self)  # another reducer's backward failed
            return
        try:
            self._check_converted()
            sharing = self._sharing()
            if self.untouched:  # it reached none, such as that of an earlier module
                self.bucket_set.reset()
                self.transition(Event.END_UNTOUCHED)
                if self.state is EXPECTED:
                    self.prepare_buckets()
                self._give_turn_up()
                self._finalize_others()
            elif sharing:
                self.parked = True
            else:
                self._end()
            if sharing or self.others():  # else none is parked
                self._end_parked()
        except BaseException:
            self.interrupt()
            raise

    def _end_parked(self) -> None:
        """End reducers of several groups that share a backward once all have reached its end."""
        together = {id(b): b for b in (self, *self._sharing())}
        for one in [*together.values()]:
            together |= {id(b): b for b in one.others() if b.running and b.task == one.task}
        parked = [b for b in together.values() if b.parked]
        if not parked or any(b.running and not b.parked for b in together.values()):
            return
        for one in parked:
            if not one.domain.channel.name:
                one.domain.channel.start_connecting(one.group)
        for one in parked:
            one.domain.connect()
        # Each reducer waits for the ranks of its group. Group names are the same on all ranks, so
        # waits in the order of names cannot form a cycle: ranks of the first unfinished group wait
        # for no other.
        for one in sorted(parked, key=lambda b: b.domain.channel.name):
            if one.parked and one.running:
                one.parked = False
                try:
                    one._end()
                except BaseException:
                    one.interrupt()
                    raise

    def _check_converted(self) -> None:
        """Raise if a parameter received a gradient without triggering the reducer's hook."""
        silent = {*self.bucket_set.missing(), *self.bucket_set.unused()}
        if silent and (converted := self.usage.converted(sorted(silent))):
            names = [self.names[i] for i in converted]
            self.domain.fail(
                ArgumentError(
                    f"parameters {names} were converted after the module was wrapped, to another "
                    "dtype or device, by swap_tensors or a parametrization: their gradients are "
                    "not reduced. Convert the module before it is wrapped, or call refit() on "
                    "every rank afterwards"
                )
            )

    def _end(self) -> None:
        self.timer.compute_end = perf_counter_ns()
        with torch.no_grad():
            self._mark_missing()
            self._launch_rest()
            if not self.all_launched:
                if self.where and not self.predecessors:
                    self.domain.fail(ReductionError(f"{NOT_STATIC}{self.launcher.note}"))
                self.transition(Event.END_SHORT)  # another backward may deliver the rest
            elif not self.manual:
                self._finalize()
                self._finalize_others()
            elif self.state is not BackwardState.COMMITTING:
                self.transition(Event.END_MANUAL)

    def _launch_rest(self) -> None:
        """Launch all buckets whose gradients have come, unless this waits for its turn."""
        self.take_turn()
        if self.predecessors:
            return
        if others := self.others():
            # those that they launch before this one's last on ranks that use more of them
            for other in others:
                if other.running and other.task == self.task and not other.untouched:
                    other._mark_missing()
            self._launch_in_order(final=False, ended=True)
        self._launch_in_order(final=True)

    def _mark_missing(self) -> None:
        """Mark parameters that received no gradient, and may receive none, as unused."""
        if self.usage.recording:
            self.bucket_set.mark_unused(self.bucket_set.missing())
            for bucket in self.bucket_set:
                bucket.expected = 0
        elif missing := self.bucket_set.missing():
            needed = (i for i in missing if self.parameters[i].requires_grad)
            if self.where or self.usage.find_unused or next(needed, None) is None:
                self.bucket_set.mark_unused(missing)

    def _finalize_others(self) -> None:
        """End the reducers that reached the end of backward before this one, and waited for it."""
        for other in self.others():
            waited = other.state is SHORT and not other.predecessors
            if waited and not other.bucket_set.missing():
                other.transition(Event.BEGIN)  # `on_end` ends running backwards only
                other.on_end(other.runs)

    @runs_outside_contexts
    def finalize(self) -> None:
        """End a backward with manual finalization, after it or in one of its hooks."""
        running = self.running
        ended = (SHORT, BackwardState.AWAITING, BackwardState.COMMITTING)
        if not self.manual or not (running or self.state in ended):
            raise ReductionError(
                "there is no reduction to finalize: set require_manual_backward_finalization "
                "before a forward outside no_sync(), run its backward, and call "
                "finalize_backward() once"
            )
        with torch.no_grad():
            if running:
                self.take_turn()
                if not self.predecessors:
                    self._launch_in_order(final=True)
            if not self.all_launched:
                self._check_converted()
                lacking = [self.names[i] for i in sorted(self.bucket_set.missing())]
                raise ReductionError(
                    f"parameters {lacking} have no gradient yet: call finalize_backward() when all "
                    "have one, and after backward while should_finalize_after_backward is true",
                    lacking,
                )
            if running:
                self.timer.compute_end = perf_counter_ns()
            try:
                self._finalize()
            except BaseException:
                self.interrupt()
                raise
        if running:
            self.transition(Event.FINALIZE)  # autograd has not reached its end yet
        self._finalize_others()

    def _finalize(self) -> None:
        """Wait for the buckets, and write the results to the gradients."""
        buckets, launched, timer = self.bucket_set, self.launcher.launched, self.timer
        unused = buckets.unused()
        used = buckets.ready()
        if not (self.usage.allows_unused or self.where):  # autograd passed None
            used += [i for i in unused if self.parameters[i].requires_grad]
        # parameters that this rank froze may be used by others, which is known if ranks vote
        voted = self.usage.allows_unused or not self.launcher.last_bucket_votes or bool(self.where)
        results, factor = self._receive(used)
        untouched = self.usage.unused if voted else ()
        frozen = (p for i in unused if not (p := self.parameters[i]).requires_grad)
        without = [] if voted else [p for p in frozen if p.grad is None]
        for one, reduced in zip(launched, results, strict=True):
            result = reduced
            if factor is not None and factor != 1.0 and one.sent:  # weights differ
                if reduced is None:
                    one.bucket.flat.mul_(factor)
                else:
                    result = reduced * factor
            if one.sent:
                one.bucket.copy_out(result, untouched)
        for parameter in without:
            if parameter.grad is not None and is_zero(parameter.grad):
                parameter.grad = None  # all ranks have sent zeros
        buckets.lay_as_parameters()
        for parameter in self.optimized:
            if parameter.grad is not None:
                with torch.enable_grad():
                    for optimizer in parameter._in_backward_optimizers:
                        optimizer.step()
                parameter.grad = None
        timer.sent = sum(one.sent for one in launched)
        timer.unused_here = tuple(self.names[i] for i in sorted(unused))
        timer.comm_end = perf_counter_ns()
        times = timer.forward_start, timer.compute_start, timer.compute_end, timer.comm_end
        ring.add_step(self.step, *times)
        self._commit(buckets.ready())

    @runs_outside_contexts
    def shadow(self) -> None:
        """Take part in the other ranks' backward with zero gradients, after `prepare`."""
        try:
            with torch.no_grad(), self.domain.lock:
                self.domain.connect()
                self._agree_on_scale(Tally())
                for number, bucket in enumerate(self.bucket_set, 1):
                    bucket.zero()
                    self._launch_filled(bucket, is_last=number == len(self.bucket_set))
                self._receive((), Tally())
        except BaseException:
            self.interrupt()
            raise
        self._commit(range(len(self.parameters)), joined=True)

    @runs_outside_contexts
    def reduce_accumulated(self) -> None:
        """Reduce the gradients that have accumulated, without a backward, after `prepare`."""
        # this says nothing about the order of gradients, or which ones a static graph has
        arrivals, counts, self.arrivals = self.arrivals, self.usage.counts, None
        self.transition(Event.BEGIN)
        try:
            with torch.no_grad():
                self.bucket_set.mark_unused(range(len(self.parameters)))
                self._mark_missing()
                self._launch_rest()
                self._finalize()
        except BaseException:
            self.interrupt()
            raise
        finally:
            self.arrivals, self.usage.counts = arrivals, counts

    def _receive(
        self, used: Iterable[int], own: Tally | None = None
    ) -> tuple[list[Tensor | None], float | None]:
        """Send the remaining messages; return all results and the factor still to be applied."""
        # `used` are parameters that got a gradient on this rank. A result is None if it is in the
        # bucket's buffer.
        launcher, usage = self.launcher, self.usage
        launcher.send_rest()
        if launcher.last_bucket_votes and usage.allows_unused:
            self._agree_on_unused(used)
        elif (
            launcher.hook is None and self.state is not BackwardState.COMMITTING and not self.where
        ):
            # the last bucket was sparse, or skipped: its messages have been sent
            self._sending_last(sent=True)
        results = []
        for launched in launcher.launched:
            since = perf_counter_ns()
            results.append(launcher.result(launched))
            self.timer.waits.append(perf_counter_ns() - since)
        if launcher.hook is None:
            factor = self._factor_from_bucket()
            if self.where and not usage.allows_unused:  # now it is known that all went around
                self._agree_on_unused(used)
            return results, factor
        if self.state is BackwardState.COMMITTING:
            return results, None
        # a hook may fail after its collectives: ranks then vote
        self._sending_last()
        # `own` is None for the summands of this rank's backward
        sums, flags = launcher.vote(self.tally() if own is None else own, usage.flags(used))
        self._check_in_step(sums)
        usage.set_unused(flags, self.group.size())
        if launcher.uses_weights is None:
            launcher.uses_weights = sums.weighted > 0 or sums.around > 0
        if not launcher.hook.linear:  # its gradients were already weighted
            return results, None
        return results, self.weights.factor(sums, self.ranks)

    def _agree_on_unused(self, used: Iterable[int]) -> None:
        """Find the parameters that no rank used since the last reduction: the last message."""
        self._sending_last()
        flags, work = self.launcher.start_sum(self.usage.flags(used))
        self.launcher.wait_small(work)
        self.usage.set_unused(flags, self.group.size())

    def _factor_from_bucket(self) -> float | None:
        """Return the factor, from the sums of weights that arrived with a bucket."""
        given = self.weights.given is not None
        if (weights_bucket := self.bucket_set.weights_bucket) is None:
            if given:
                self.domain.fail(NotSupportedError(NO_BUCKET))
            return None
        # on an accelerator, reading the sums blocks the CPU: only ranks with a weight do so there,
        # and they report a mismatch; so do those that went around the wrapper
        if not (given or self.where) and weights_bucket.flat.device.type != "cpu":
            return None
        sums = Tally.read(weights_bucket.extra)
        self._check_in_step(sums)
        return self.weights.factor(sums, self.ranks)

    def _check_in_step(self, sums: Tally) -> None:
        """Raise on every rank if the ranks' gradients belong to different steps."""
        domain, (skipped, *_) = self.domain, self.forwards.count()
        if not sums.same_way:
            each = domain.channel.exchange("around", self.where, domain.seconds) or [self.where]
            domain.fail(
                MismatchError(
                    "the forward of a backward went around the wrapper on some ranks only "
                    f"({', '.join(filter(None, each)) or 'not known'}): call the wrapper on all "
                    "ranks or on none; run a backward of one rank alone in no_sync()"
                )
            )
        if sums.in_step:
            return
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

    def tally(self) -> Tally:
        """Return this rank's summands in this backward: weights and counts of forwards."""
        return self.weights.tally(*self.forwards.count())

    def _sending_last(self, *, sent: bool = False) -> None:
        """Record that the backward's last message is about to be sent, or was sent."""
        self.end = self.domain.log.position() + (not sent)
        self.transition(Event.SEND_LAST)

    def _commit(self, used: Sequence[int], *, joined: bool = False) -> None:
        """Record that the gradients hold the reduced values."""
        # `used` are parameters that a rank used. `joined`: this rank took part by `shadow`.
        self.domain.log.forget(self.end)
        if not self.bucket_set.options.rebuilds:
            self.arrivals = None
        elif self.arrivals is not None and self.launcher.order is None:
            # sent now: all ranks end the reducers of a backward in one order, while their next
            # forwards may run in different orders, where ranks would wait in a circle
            first = self.bucket_set.first_order()
            self.launcher.start_order([*dict.fromkeys([*self.arrivals, *first])])
        if self.usage.recording:
            came = Counter(used)
            self.usage.counts = {i: came[i] for i in range(len(self.parameters))}
        self._forget_accumulated()
        self.forwards.commit()
        # now that ranks are together: their next forwards may differ in number. A rank that has run
        # out of input has old parameters
        if not (joined or self.shadowed):
            own = self.replica_message(self.forwards)
            if own is not None:
                self.replica_sum, self.since_replicas = self.launcher.start_sum(own), 0
        self.since_replicas += 1
        self.transition(Event.COMMIT)
        try:
            self.launcher.committed()
        finally:  # the backward has ended all the same, and the next one starts from a clear state
            self._clear()

    # -- errors ------------------------------------------------------------------------------

    def interrupt(self) -> None:
        """Abort the running backward after an exception, unless it was already handled."""
        # sends nothing: `FaultDomain.report_interrupted` reports it at the next forward
        if Event.INTERRUPT in TRANSITIONS[self.state]:
            self.transition(Event.INTERRUPT)
            self._forget_accumulated()
            self.weights.given = None  # it was this backward's
            self.domain.note_interrupted()
            # gradients may be zeroed in place before the ranks are resynchronized
            for launched in self.launcher.launched:
                if launched.sent:
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
        """Raise if the previous backward did not end, or get the other ranks out of it."""
        if self.running:
            self.interrupt()
        if self.awaits_finalization:
            self.raise_not_finalized()
        self.domain.report_interrupted()
        self.domain.raise_deferred()
        if self.state is not SHORT:
            return
        short = [b for b in (self, *self.others()) if b.state is SHORT]
        missing = [(b, i) for b in short for i in sorted(b.bucket_set.missing())]
        lacking = [b.names[i] for b, i in missing if b.parameters[i].requires_grad]
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
        interrupted = (BackwardState.INTERRUPTED, BackwardState.UNDECIDED)
        if self.state.unfinished and self.state not in interrupted:
            self._forget_accumulated()
        if self.running:
            self.weights.given = None
        self.transition(Event.RESET)
        self._clear()

    def _forget_accumulated(self) -> None:
        """Forget accumulated gradients, which were reduced or will not be."""
        self.weights.clear()
        self.usage.touched.clear()

    def start_over(self) -> None:
        """Return to the initial state: ranks may have had different assignments of buckets."""
        self.reset()
        self.shadowed = False  # the waiting rank has raised an error
        self.usage.counts, self.usage.unused = {}, frozenset()
        self.forwards = Forwards()
        self.since_replicas = 0
        self.launcher.uses_weights = None
        self.reassign_buckets(self.bucket_set.first_order())

    def _clear(self) -> None:
        """Forget arrived gradients and buckets in flight."""
        self.had_undefined = self.takes_part = self.parked = False
        self.launcher.launched.clear()
        self.launcher.scale = None
        self._go_through()
        self._give_turn_up()
        if self.arrivals is not None:
            self.arrivals.clear()
        self.bucket_set.reset()


@run_as_written
def on_gradient(
    reference: weakref.ref[Backward], index: int, _: object, incoming: tuple[Any, ...]
) -> None:
    """Handle a parameter's gradient, a tensor or None: the reducer's work per parameter."""
    # The reference is weak, so that the hook does not keep the reducer alive.
    backward = reference()
    if backward is None:
        return
    # do not bind incoming[0] to a name: `Ownership.may_write` counts references to it, and a name
    # would add one
    state = backward.state
    running = state is RUNNING or state is RUNNING_AGAIN
    if not running and not backward.admit(index, incoming):
        return
    # autograd accumulates nothing for a parameter that was frozen after the forward
    if incoming[0] is None or not backward.parameters[index].requires_grad:
        backward.mark_undefined(index)
        return
    if (arrivals := backward.arrivals) is not None:
        arrivals.append(index)
    if index in backward.streams.unknown:
        backward.streams.record(index)
    bucket = backward.bucket_set.of[index]
    bucket.ready.append(index)
    if index in bucket.early:
        try:
            bucket.copy_in_early(index, incoming)
        except (ReductionError, NotSupportedError) as error:
            backward.domain.fail(error)
    if len(bucket.ready) >= bucket.expected:
        backward.on_bucket_ready(bucket)


def users_line() -> str:
    """Return file and line of the program's call that led here, or that its main thread runs."""
    # on accelerators, hooks run in threads of autograd
    main = sys._current_frames().get(threading.main_thread().ident or 0)
    for innermost in (sys._getframe(), main):
        frame = innermost
        while frame is not None:
            if is_users(frame.f_code.co_filename):
                return f"{frame.f_code.co_filename}:{frame.f_lineno}"
            frame = frame.f_back
    return "(no line of the program)"


class _EndOfBackward:
    """Callback at the end of a backward; autograd drops it uncalled after an exception."""

    def __init__(self, backward: Backward, run: int) -> None:
        self._backward, self._run = backward, run

    @run_as_written
    def __call__(self) -> None:
        self._backward.on_end(self._run)

    def __del__(self) -> None:
        # after an exception, autograd drops its callbacks without calling them; the callback of a
        # parked backward did run, and the backward waited for another whose callback did not
        backward = self._backward
        if backward.running and self._run == backward.runs:
            backward.interrupt()
