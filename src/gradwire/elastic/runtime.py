"""Carry out the protocol's effects for one member: rendezvous, groups, transfers, commits."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Mapping

import torch
from torch.distributed import AllreduceOptions, ReduceOp, Store, Work

from gradwire.elastic import protocol as p
from gradwire.elastic.generations import GenerationGroup, Groups, means_a_loss, wait_for
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


class Runtime:
    """Protocol state, store and group of one member.

    Args:
        store: The store.
        name: Name of the run.
        expect: Number of members that the first generation waits for.
        backend: "shm" or "gloo".
        timeout: Seconds that a collective, and a member that is alive but does not come, may take.
        silence: Seconds without a sign of life after which a member counts as lost.

    Attributes:
        member: Protocol state of the member.
        group: Group of its generation, or a group of this process alone.
        monitor: Signs of life.
        membership: Keys of the run in the store.
        on_commit: Called to step the optimizers.
        on_group: Called with each new group, before anything is sent on it.
        on_done: Called when all steps are committed; the group is of this process alone then.
        on_transfer: Called to send (True) or receive (False) the state.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        *,
        expect: int,
        backend: str,
        timeout: float,
        silence: float,
    ) -> None:
        self._expect, self._timeout = expect, timeout
        self._groups = Groups(backend, timeout)
        listener = self._groups.listener
        try:
            self.membership = Membership(store, timeout, name, listener.name if listener else "")
        except BaseException:
            self._groups.close()
            raise
        self.monitor = Monitor(self.membership, silence)
        self.member = p.Member(self.membership.number, 0)
        self._failed = False
        self._attempts, self._last_loss = 1, ""
        self.group: GenerationGroup = self._groups.solo()
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
        mine, first = json.loads(text), json.loads(self.membership.first("settings", text))
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
            self.membership.first("refused", str(error))
        raise error

    def advance(self) -> bool:
        """Continue until a step is to be computed; return False if all are done.

        Raises:
            RunOverError: The other members are done, and no member has the state.
            PeerFailedError: A member asked all to raise an error.
            MismatchError: A member of the first generation has other settings.
            DistributedError: The same members lost the same step several times in a row.
        """
        while self.member.phase is p.Phase.ARRIVED:
            self._rendezvous()
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

    def wait(self, work: Work) -> None:
        """Wait for a collective of the group; raise a DistributedError if it failed."""
        wait_for(work, self._check, self._timeout)

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
            self.membership.first("failed", str(error))

    def stop(self) -> None:
        """Leave the run, keeping a group of this process alone."""
        self._groups.close()
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
            if self.monitor.reason or self.membership.count(decision.generation + 1):
                return True
            if self.monitor.absent(decision.members).gone:
                return True
            time.sleep(POLL_SECONDS)
        return False

    # -- effects ---------------------------------------------------------------------------

    def _handle(self, event: p.Event) -> None:
        self.member, effects = p.transition(self.member, event)
        for effect in effects:
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
                case p.Form(decision):
                    self._form(decision)
                case p.Transfer(decision):
                    self._transfer(decision)
                case p.Finish():
                    self._finish(self.member.held)
                case p.Reduce() | p.Barrier():
                    pass  # the training loop continues

    def _finish(self, generation: int) -> None:
        """Report that all steps are committed.

        Raises:
            RunOverError: The run has another result, of members that took this one for dead.
        """
        try:
            first = self.membership.finish(generation)
            same = p.same_lineage(generation, first, self.membership.source_of)
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
        self.group = self._groups.solo()
        self.on_done()

    # -- phases ----------------------------------------------------------------------------

    def _rendezvous(self) -> None:
        """Wait for the decision of the rendezvous, and propose it once all have arrived."""
        number, since = self.member.rendezvous, time.monotonic()
        while (decision := self.membership.decision(number)) is None:
            if (failure := self.membership.get("failed")) is not None:
                raise PeerFailedError(failure.decode())
            if number == 1 and (refusal := self.membership.get("refused")) is not None:
                raise MismatchError(refusal.decode())
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
                "of its members died: call collectives on all members or on "
                f"none; the last error was {self._last_loss}"
            )

    def _seen(self, number: int, waited: float) -> p.Seen:
        previous = self.membership.decision(number - 1)
        arrived = self.membership.arrivals(number)
        here = {r.member for r in arrived}
        known = () if previous is None else (*previous.members, *previous.former)
        absent = self.monitor.absent({*known, *here})
        gone = absent.gone
        if previous is not None and waited > self._timeout:
            gone |= {m for m in previous.members if m not in here}  # alive, but does not arrive
        enough = len(here) >= self._expect or waited > self._timeout
        # read after the members that left: a member reports that it is done before it leaves
        finished, others = self.membership.any_finished(), gone - {self.member.number}
        return p.Seen(previous, arrived, others, absent.dead, enough, finished)

    def _form(self, decision: p.Decision) -> None:
        try:
            group = self._groups.form(decision, self.rank, self.membership, self.monitor)
        except DistributedError as error:
            if not means_a_loss(error):
                raise
            self._handle(p.Lost())
            return
        self.group.leave(failed=False)  # the group of this process alone
        self.group = group
        self.monitor.watch(decision.generation, decision.members, group.abort)
        self.on_group()
        self._handle(p.Formed())

    def _transfer(self, decision: p.Decision) -> None:
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
