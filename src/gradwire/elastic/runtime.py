"""Carry out the protocol's effects for one member: rendezvous, groups, transfers, commits."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch.distributed import AllreduceOptions, ReduceOp, Store

from gradwire.elastic import protocol as p
from gradwire.elastic.generations import (
    Forming,
    GenerationGroup,
    Wait,
    make_listener,
    make_wait,
    means_a_loss,
)
from gradwire.elastic.membership import Membership, Monitor
from gradwire.elastic.supervisor import report
from gradwire.errors import (
    DistributedError,
    MismatchError,
    NotSupportedError,
    PeerFailedError,
    PeerLostError,
    RunOverError,
)

POLL_SECONDS = 0.002
MAX_ATTEMPTS = 4
"""Number of generations in a row that may begin with the same members and the same step."""


@dataclass(frozen=True)
class Options:
    """Backend and deadlines of a run, as passed to `join`."""

    expect: int
    backend: str
    timeout: float
    heartbeat: float
    silence: float


class Runtime:
    """Protocol state, store and group of one member.

    Args:
        store: The store.
        name: Name of the run.
        options: Backend and deadlines.

    Attributes:
        member: Protocol state of the member.
        group: Group of its generation, or a group of this process alone.
        monitor: Signs of life.
        membership: Keys of the run in the store.
        wait: Function that waits for a collective of the group.
        on_commit: Called to step the optimizers.
        on_group: Called with each new group, before anything is sent on it.
        on_done: Called when all steps are committed; the group is of this process alone then.
        on_transfer: Called to send (True) or receive (False) the state.
    """

    def __init__(self, store: Store, name: str, options: Options) -> None:
        self._options = options
        listener = make_listener(options.backend)
        try:
            of_listener = "" if listener is None else listener.name
            self.membership = Membership(store, options.timeout, name, of_listener)
        except BaseException:
            if listener is not None:
                listener.close()
            raise
        self.monitor = Monitor(self.membership, options.heartbeat, options.silence)
        self._forming = Forming(
            self.membership, self.monitor, listener, options.backend, options.timeout
        )
        self.member = p.Member(self.membership.number, 0)
        self._failed = False
        self._attempts, self._last_loss = 1, ""
        self.group: GenerationGroup = self._forming.solo()
        self.wait: Wait = make_wait(self._check, options.timeout)
        self.on_commit: Callable[[], None] = lambda: None
        self.on_group: Callable[[], None] = lambda: None
        self.on_done: Callable[[], None] = lambda: None
        self.on_transfer: Callable[[bool], None] = lambda sends: None

    # -- driving ---------------------------------------------------------------------------

    def start(self, steps: int, committed: int, settings: Mapping[str, object]) -> None:
        """Arrive with a state of `committed` steps, to do `steps` in all.

        Raises:
            MismatchError: The first member has other settings.
        """
        self._check_settings(settings)
        self.member = p.Member(self.member.number, steps, committed=committed)
        self._handle(p.Start(self.membership.latest()))

    def _check_settings(self, mine: Mapping[str, object]) -> None:
        """Raise if the first member has other settings.

        Before the first generation, the error is raised on all members.
        """
        text = json.dumps(mine, default=str)  # NumPy's numbers, too
        mine, first = json.loads(text), json.loads(self.membership.agree_on(text))
        differing = [name for name in mine if mine[name] != first.get(name)]
        if not differing:
            return
        name = differing[0]
        error = MismatchError(
            f"{name} is {mine[name]!r} on member {self.member.number} and {first.get(name)!r} on "
            "the first member: pass the same value on all members",
            [first.get(name), mine[name]],
        )
        if self.membership.latest() == 0:  # a newcomer must not end the run of the others
            self.membership.refuse(str(error))
        raise error

    def advance(self) -> bool:
        """Continue until a step is to be computed; return False if all are done.

        Raises:
            RunOverError: The other members are done, and no member has the state.
            PeerFailedError: A member asked all to raise an error.
            MismatchError: A member of the first generation has other settings.
            DistributedError: The same members lost the same step several times in a row.
        """
        act = {
            p.Phase.ARRIVED: self._rendezvous,
            p.Phase.FORMING: self._form,
            p.Phase.TRANSFER: self._transfer,
        }
        while self.member.phase in act:
            act[self.member.phase]()
        return self.member.phase is p.Phase.REDUCING

    def any(self, flag: bool) -> bool:
        """Return True if any member passes True.

        Raises:
            DistributedError: A member was lost: call `lost`.
        """
        if self.size == 1:
            return flag
        flags = torch.tensor([int(flag)], dtype=torch.int32)
        try:
            work = self.process_group.allreduce([flags], _MAX_AT_ONCE)
        except DistributedError:
            self._check()
            raise
        self.wait(work)
        return bool(flags)

    def commit(self, *, stop: bool) -> None:
        """Enter the barrier with complete gradients, and commit.

        Args:
            stop: True if a member asked to stop after this step; the same on all members.

        Raises:
            DistributedError: A member was lost: call `lost`.
        """
        self._handle(p.Reduced(stop))
        self._handle(p.Passed(self._pass_barrier()))

    def _pass_barrier(self) -> bool:
        """Wait for all members; return True if one of them saw a newcomer."""
        if self.size == 1:
            self._check()
        return self.any(self.monitor.wanted)

    def lost(self, error: BaseException) -> None:
        """Leave the generation because a member was lost.

        Args:
            error: Error that reports the loss.
        """
        self._last_loss = f"{type(error).__name__}: {error}"
        if self.member.phase in (p.Phase.REDUCING, p.Phase.BARRIER):
            self._failed = True
            self._handle(p.Lost())

    def end_all(self, error: BaseException) -> None:
        """Make all members raise an error instead of repeating the step."""
        with contextlib.suppress(DistributedError):  # the store may be gone
            self.membership.fail(str(error))

    def stop(self) -> None:
        """Leave the run, keeping a group of this process alone."""
        self._forming.close()
        self.monitor.close()
        if self.member.phase is not p.Phase.DONE:
            with contextlib.suppress(DistributedError):  # the store may be gone
                self.membership.leave()
            self.group.leave(failed=True)

    @property
    def process_group(self) -> torch.distributed.ProcessGroup:
        """Process group of the generation.

        Raises:
            NotSupportedError: The generation has ended, and the next one has not begun.
        """
        if self.group.group is None:
            raise NotSupportedError(
                "run.group is unavailable between two steps after a member was lost, left or asked "
                "to join: use it within `with step:`, whose work is repeated with the step"
            )
        return self.group.group

    @property
    def size(self) -> int:
        """Number of members of the generation."""
        return 1 if self.member.decision is None else len(self.member.decision.members)

    @property
    def rank(self) -> int:
        """This member's rank in the generation."""
        decision = self.member.decision
        return 0 if decision is None else decision.members.index(self.member.number)

    def was_lost(self, seconds: float = 0.5) -> bool:
        """Return True if a member left the generation or is lost.

        Waits up to `seconds` for evidence. Used after an error with several possible causes.
        """
        decision = self.member.decision
        if decision is None or len(decision.members) == 1:
            return False
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if self.monitor.reason or self.membership.is_open(decision.generation + 1):
                return True
            if self.monitor.absent(decision.members).gone:
                return True
            time.sleep(POLL_SECONDS)
        return False

    # -- effects ---------------------------------------------------------------------------

    def _handle(self, event: p.Event) -> None:
        self.member, effects = p.transition(self.member, event)
        for effect in effects:
            self._execute(effect)

    def _execute(self, effect: p.Effect) -> None:
        match effect:
            case p.Arrive(number, arrival):
                self.membership.arrive(number, arrival)
            case p.Propose(decision):
                self.membership.propose(decision)
            case p.Commit():
                self.on_commit()
            case p.Leave():
                self.monitor.ignore()
                self.group.leave(failed=self._failed)
                self._failed = False
            case p.Finish():
                self._finish()
            case _:
                pass  # `advance` or the training loop continues

    def _finish(self) -> None:
        """Report that all steps are committed.

        Raises:
            RunOverError: The run has another result, of members that took this one for dead.
        """
        decision = self.member.decision
        assert decision is not None
        try:
            first = self.membership.finish(decision.generation)
            same = p.same_lineage(decision.generation, first, self._source_of)
        except DistributedError:
            same = True  # the store is gone, but all steps are committed
        report(finished=same)
        if not same:
            self._handle(p.Over())
            raise RunOverError(
                "the other members finished the run without this process, which continued alone: "
                "its state is not that of the run; load the checkpoint that they saved"
            )
        self.group.leave(failed=False)
        self.group = self._forming.solo()
        self.on_done()

    def _source_of(self, generation: int) -> int:
        decision = self.membership.decision(generation)
        assert decision is not None
        return decision.source

    # -- phases ----------------------------------------------------------------------------

    def _rendezvous(self) -> None:
        """Wait for the decision of the rendezvous, and propose it once all have arrived."""
        number, since = self.member.rendezvous, time.monotonic()
        while (decision := self.membership.decision(number)) is None:
            if (failure := self.membership.failure()) is not None:
                raise PeerFailedError(failure)
            if number == 1 and (refusal := self.membership.refusal()) is not None:
                raise MismatchError(refusal)
            seen = self._seen(number, time.monotonic() - since)
            if p.is_over(seen):
                raise RunOverError(*self.membership.why_over())
            self._handle(seen)
            time.sleep(POLL_SECONDS)
        self._check_attempts(decision)
        self._handle(p.Decided(decision))

    def _check_attempts(self, decision: p.Decision) -> None:
        """Raise on all members if a step fails repeatedly although none of them is gone."""
        before = self.member.decision
        repeated = before is not None and (
            (before.generation, before.committed, {*before.members})
            == (decision.source, decision.committed, {*decision.members})
        )
        self._attempts = self._attempts + 1 if repeated else 1
        if self._attempts > MAX_ATTEMPTS:
            raise DistributedError(
                f"step {decision.committed} was lost {MAX_ATTEMPTS} times in a row although none "
                "of its members died: call collectives on all members or on none; "
                f" the last error was {self._last_loss}"
            )

    def _seen(self, number: int, waited: float) -> p.Seen:
        previous = self.membership.decision(number - 1)
        arrived = self.membership.arrivals(number)
        here = {r.member for r in arrived}
        known = () if previous is None else (*previous.members, *previous.former)
        absent = self.monitor.absent({*known, *here})
        gone = absent.gone
        if previous is not None and waited > self._options.timeout:
            gone |= {m for m in previous.members if m not in here}  # alive, but does not arrive
        enough = len(here) >= self._options.expect or waited > self._options.timeout
        # read after the members that left: a member reports that it is done before it leaves
        finished, others = self.membership.any_finished(), gone - {self.member.number}
        return p.Seen(previous, arrived, others, absent.dead, enough, finished)

    def _form(self) -> None:
        decision = self.member.decision
        assert decision is not None
        try:
            group = self._forming.form(decision, self.rank)
        except DistributedError as error:
            if not means_a_loss(error):
                raise
            self._handle(p.Lost())
            return
        self.group.leave(failed=False)  # the group of this process alone
        self.group = group
        self.monitor.watch(decision.generation, decision.members, group.abort)
        self.membership.forget_processes({*decision.members, *decision.former})
        self.on_group()
        self._handle(p.Formed())

    def _transfer(self) -> None:
        decision = self.member.decision
        assert decision is not None
        try:
            self.on_transfer(self.member.number in decision.holders)
        except DistributedError as error:
            if not means_a_loss(error):
                raise
            self._failed = True
            self._handle(p.Lost())
            return
        self._handle(p.Transferred())

    def _check(self) -> None:
        if self.monitor.reason:
            raise PeerLostError(self.monitor.reason)


_MAX_AT_ONCE = AllreduceOptions()
_MAX_AT_ONCE.reduceOp = ReduceOp(ReduceOp.MAX)
_MAX_AT_ONCE.asyncOp = False  # on shm it then runs in this thread: 45 µs instead of 240
