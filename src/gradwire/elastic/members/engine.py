"""Carries out what the protocol says, for one member: rounds, groups, transfers, commits."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch.distributed import AllreduceOptions, ReduceOp, Store

from gradwire.elastic import protocol as p
from gradwire.elastic.members.forming import Forming, make_listener
from gradwire.elastic.members.groups import EpochGroup
from gradwire.elastic.members.membership import Membership
from gradwire.elastic.members.monitor import Monitor
from gradwire.elastic.members.reports import report
from gradwire.elastic.members.waiting import Wait, make_wait, means_a_loss
from gradwire.errors import (
    DistributedError,
    MismatchError,
    NotSupportedError,
    PeerFailedError,
    PeerLostError,
    RunOverError,
)

POLL_SECONDS = 0.002


@dataclass(frozen=True)
class Options:
    """How members wait for each other; as `join` has them."""

    expect: int
    backend: str
    timeout: float
    heartbeat: float
    silence: float


class Engine:
    """One member: its protocol state, the store, its group.

    Args:
        store: The store.
        name: The run's.
        options: Deadlines.

    Attributes:
        member: What the protocol knows.
        group: The group of its epoch, or one of this process alone.
        monitor: Signs of life.
        membership: The store.
        wait: Waits for a collective of the group.
        on_commit: Called to step the optimizers.
        on_group: Called with each new group, before anything is sent on it.
        on_done: Called when all steps are committed, with a group of this process alone.
        on_transfer: Called with the group to send or receive the state; whether this one sends.
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
        self.group: EpochGroup = self._forming.solo()
        self.wait: Wait = make_wait(self._check, options.timeout)
        self.on_commit: Callable[[], None] = lambda: None
        self.on_group: Callable[[], None] = lambda: None
        self.on_done: Callable[[], None] = lambda: None
        self.on_transfer: Callable[[bool], None] = lambda sends: None

    # -- driving ---------------------------------------------------------------------------

    def start(self, steps: int, version: int, settings: Mapping[str, object]) -> None:
        """Register, with a state that has `version` steps, to do `steps` in all.

        Raises:
            MismatchError: The first member has other settings.
        """
        self._check_settings(settings)
        self.member = p.Member(self.member.number, steps, version=version)
        self._handle(p.Start(self.membership.latest()))

    def _check_settings(self, mine: Mapping[str, object]) -> None:
        """Raise if the first member has other settings; before the first epoch, on all members."""
        text = json.dumps(mine, default=str)  # numbers of NumPy's
        mine, first = json.loads(text), json.loads(self.membership.agree_on(text))
        differing = [name for name in mine if mine[name] != first.get(name)]
        if not differing:
            return
        name = differing[0]
        error = MismatchError(
            f"{name} is {mine[name]!r} on member {self.member.number} and {first.get(name)!r} on "
            "the first member: pass the same on all members",
            [first.get(name), mine[name]],
        )
        if self.membership.latest() == 0:  # a newcomer does not end the run of others
            self.membership.refuse(str(error))
        raise error

    def advance(self) -> bool:
        """Go on until a step is to be computed; False if all are done.

        Raises:
            RunOverError: The others are done, and the state is gone with them.
            PeerFailedError: A member wants all to end.
            MismatchError: A member of the first epoch came with other settings.
        """
        act = {
            p.Phase.REGISTERED: self._round,
            p.Phase.FORMING: self._form,
            p.Phase.TRANSFER: self._transfer,
        }
        while self.member.phase in act:
            act[self.member.phase]()
        return self.member.phase is p.Phase.REDUCING

    def any(self, flag: bool) -> bool:
        """True if a member passes True.

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
            stop: Whether a member has asked to stop after this step; the same on all members.

        Raises:
            DistributedError: A member was lost: call `lost`.
        """
        self._handle(p.Reduced(stop))
        self._handle(p.Passed(self._pass_barrier()))

    def _pass_barrier(self) -> bool:
        """Wait until all members have come here; whether one of them saw somebody new."""
        if self.size == 1:
            self._check()
        return self.any(self.monitor.wanted)

    def lost(self) -> None:
        """A member was lost: leave the epoch."""
        if self.member.phase in (p.Phase.REDUCING, p.Phase.BARRIER):
            self._failed = True
            self._handle(p.Lost())

    def end_all(self, error: BaseException) -> None:
        """Have all members raise an error, instead of trying the step again."""
        with contextlib.suppress(DistributedError):  # the store may be gone
            self.membership.fail(str(error))

    def stop(self) -> None:
        """Take part no more; a group of this process alone stays."""
        self._forming.close()
        self.monitor.close()
        if self.member.phase is not p.Phase.DONE:
            with contextlib.suppress(DistributedError):  # the store may be gone
                self.membership.leave()
            self.group.leave(failed=True)

    @property
    def process_group(self) -> torch.distributed.ProcessGroup:
        """The group.

        Raises:
            NotSupportedError: The epoch is over, and the next one has not begun.
        """
        if self.group.group is None:
            raise NotSupportedError(
                "run.group is used between two steps, when a member was lost, wants to join, or "
                "has left the run: there is no group before the next step. Use it within `with "
                "step:`, where what it does is repeated with the step, as step.map does"
            )
        return self.group.group

    @property
    def size(self) -> int:
        """How many members the epoch has."""
        return 1 if self.member.decision is None else len(self.member.decision.members)

    @property
    def rank(self) -> int:
        """This member's rank in the epoch."""
        decision = self.member.decision
        return 0 if decision is None else decision.members.index(self.member.number)

    def was_lost(self, seconds: float = 0.5) -> bool:
        """Whether a member has left the epoch or is lost: asked after an unclear error."""
        decision = self.member.decision
        if decision is None or len(decision.members) == 1:
            return False
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if self.monitor.reason or self.membership.is_open(decision.epoch + 1):
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
            case p.Register(number, registration):
                self.membership.register(number, registration)
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
                pass  # `advance` or the training loop goes on with it

    def _finish(self) -> None:
        """All steps are committed here.

        Raises:
            RunOverError: The run has another result, of members that took this one for dead.
        """
        decision = self.member.decision
        assert decision is not None
        try:
            first = self.membership.finish(decision.epoch)
            same = p.same_line(decision.epoch, first, self._source_of)
        except DistributedError:
            same = True  # all is committed without the store
        report(finished=same)
        if not same:
            self._handle(p.Over())
            raise RunOverError(
                "the run's members were done before, and had left this process out, which went on "
                "alone: its state is not the run's; load the checkpoint that they have saved"
            )
        self.group.leave(failed=False)
        self.group = self._forming.solo()
        self.on_done()

    def _source_of(self, epoch: int) -> int:
        decision = self.membership.decision(epoch)
        assert decision is not None
        return decision.source

    # -- phases ----------------------------------------------------------------------------

    def _round(self) -> None:
        """Wait for the decision of the round, and make it when nobody is missing."""
        number, since = self.member.round, time.monotonic()
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
        self._handle(p.Decided(decision))

    def _seen(self, number: int, waited: float) -> p.Seen:
        previous = self.membership.decision(number - 1)
        registered = self.membership.registered(number)
        here = {r.member for r in registered}
        known = () if previous is None else (*previous.members, *previous.former)
        absent = self.monitor.absent({*known, *here})
        gone = absent.gone
        if previous is not None and waited > self._options.timeout:
            gone |= {m for m in previous.members if m not in here}  # it runs, and does not come
        enough = len(here) >= self._options.expect or waited > self._options.timeout
        # asked after who has left, which a member that is done does later
        finished, others = self.membership.any_finished(), gone - {self.member.number}
        return p.Seen(previous, registered, others, absent.dead, enough, finished)

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
        self.group.leave(failed=False)  # that of this process alone
        self.group = group
        self.monitor.watch(decision.epoch, decision.members, group.abort)
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


def barrier(engine: Engine) -> None:
    """Wait until all members of the epoch have come here."""
    engine.wait(engine.process_group.allreduce([torch.zeros(1, dtype=torch.int32)], _MAX))


_MAX = AllreduceOptions()
_MAX.reduceOp = ReduceOp(ReduceOp.MAX)
_MAX_AT_ONCE = AllreduceOptions()
_MAX_AT_ONCE.reduceOp = ReduceOp(ReduceOp.MAX)
_MAX_AT_ONCE.asyncOp = False  # on shm in this thread: 45 µs, with the group's thread 240
