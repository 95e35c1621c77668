"""Who is in an epoch and which step it continues with: a state machine per member, without I/O.

Events go in, effects come out; the runtime (`run.py`) carries them out, and so does the checker in
the tests, in every order. An *epoch* is one set of members and their process group. All of them
commit a step or none: a member whose gradients are complete enters a barrier, and commits when it
has passed. Whoever fails on the way leaves the epoch and registers for the next one, with how far
it came. One member closes that *round* with a decision, which is written once.

Why it is right: who passed a barrier knows that all members had complete gradients. So if anybody
committed a step, every member of that epoch can, and `decide` has them do it: the step with which
an epoch begins is the least that any of the last epoch's members registered could come to, and none
is beyond that. A request to stop is known to all whose gradients are complete, so that it is
committed with the step, by all or none.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from enum import IntEnum
from typing import NamedTuple

from gradwire.elastic.protocol.events import (
    Barrier,
    Commit,
    Decided,
    Decision,
    Effect,
    Event,
    Finish,
    Form,
    Formed,
    Leave,
    Lost,
    Over,
    Passed,
    Propose,
    Reduce,
    Reduced,
    Register,
    Registration,
    Seen,
    Start,
    Transfer,
    Transferred,
)


class Phase(IntEnum):
    """Where a member is."""

    NEW = 0  # it has not registered yet
    REGISTERED = 1  # for the round `round`
    FORMING = 2  # the group of its epoch
    TRANSFER = 3  # those that have the state send it to those that have not
    REDUCING = 4  # gradients are computed and added up
    BARRIER = 5  # they are complete here
    DONE = 6  # all steps are committed
    OVER = 7  # others were done before this member was taken in, or with another state


class Member(NamedTuple):
    """What one member knows. A tuple, as steps replace it three times: of a dataclass, 30 µs.

    Args:
        number: Given by the store, never again to another process.
        steps: How many steps there are; fewer once a step is committed after which to stop.
        phase: Where it is.
        version: How many steps its state has.
        held: The last epoch in which it had the state of training.
        complete: Whether it has the complete gradients of step `version`.
        round: The round that it registered for last, or whose epoch it is in.
        decision: The epoch that it is in, or was.
        stop: Whether it has complete gradients, and a member asked to stop after that step.
    """

    number: int
    steps: int
    phase: Phase = Phase.NEW
    version: int = 0
    held: int = 0
    complete: bool = False
    round: int = 0
    decision: Decision | None = None
    stop: bool = False

    def registration(self) -> Registration:
        """What it registers with."""
        steps = self.version + 1 if self.stop else self.steps
        return Registration(self.number, self.held, self.version, self.complete, steps)


def may_close(seen: Seen) -> bool:
    """Whether a round need not wait for anybody.

    It waits for the members of the epoch before that still live. And where nobody has the state, it
    waits for all that ever may have had it, until they are dead: a new start would discard it. Once
    a member is done, an earlier epoch's state is none: steps that it counts would be undone.
    """
    here = [r for r in seen.registered if r.member not in seen.gone]
    if seen.previous is None:
        return bool(here) and seen.enough
    numbers = {r.member for r in here}
    if not here or any(m not in numbers | seen.gone for m in seen.previous.members):
        return False
    if any(_has_state(r, seen) for r in here):
        return True
    return not seen.finished and _holders_are_dead(seen)


def is_over(seen: Seen) -> bool:
    """Whether a member is done, and nobody is left who may have the state."""
    if any(_has_state(r, seen) for r in seen.registered if r.member not in seen.gone):
        return False
    return seen.finished and _holders_are_dead(seen)


def _has_state(registration: Registration, seen: Seen) -> bool:
    """Whether a member can go on from its state."""
    if seen.finished and seen.previous is not None:
        return registration.held == seen.previous.epoch
    return registration.held > 0


def _holders_are_dead(seen: Seen) -> bool:
    if seen.previous is None:
        return True
    # who has registered with the state, and sleeps since, has it still
    stateless = {r.member for r in seen.registered if not _has_state(r, seen)}
    return (stateless | seen.dead).issuperset((*seen.previous.members, *seen.previous.former))


def decide(epoch: int, seen: Seen) -> Decision:
    """The epoch that a round makes of those that have registered and live."""
    here = sorted((r for r in seen.registered if r.member not in seen.gone), key=lambda r: r.member)
    latest = max(r.held for r in here)
    if latest:
        holders = [r for r in here if r.held == latest]
        version = min(r.version + r.complete for r in holders)
    else:  # all are at their own start, which a checkpoint may have put forward
        version = max(r.version for r in here)
        holders = [next(r for r in here if r.version == version)]
    # who stops at this version knows it: who does not was told of more steps, or of none
    steps = min(r.steps for r in holders if r.version + r.complete == version)
    first = tuple(r.member for r in holders)
    members = (*first, *(r.member for r in here if r.member not in first))
    before = seen.previous
    past: Collection[int] = () if before is None else (*before.members, *before.former)
    former = tuple(sorted({m for m in past if m not in members and m not in seen.dead}))
    return Decision(epoch, members, first, version, former, latest, steps)


def same_line(epoch: int, other: int, source_of: Callable[[int], int]) -> bool:
    """Whether one of two epochs has its state from the other: what they commit is the same.

    Where each of two members takes the other for dead in turn, both may come to the last step.

    Args:
        epoch: One of them.
        other: The other.
        source_of: As decisions have it, of an epoch.
    """
    first, last = sorted((epoch, other))
    while last > first:
        last = source_of(last)
    return last == first


def transition(member: Member, event: Event) -> tuple[Member, tuple[Effect, ...]]:
    """What a member is after an event, and what it does, in this order."""
    match event:
        case Start(epoch):
            return _register(member, epoch + 1)
        case Seen():
            if member.phase is not Phase.REGISTERED or not may_close(event):
                return member, ()
            return member, (Propose(decide(member.round, event)),)
        case Decided(decision):
            return _enter(member, decision)
        case Formed():
            assert member.decision is not None
            if len(member.decision.holders) < len(member.decision.members):
                return member._replace(phase=Phase.TRANSFER), (Transfer(member.decision),)
            return _next_step(member)
        case Transferred():
            assert member.decision is not None
            return _next_step(_begin_with(member, member.decision))
        case Reduced(stop):
            return member._replace(complete=True, stop=stop, phase=Phase.BARRIER), (Barrier(),)
        case Passed(leave):
            return _commit(member, leave=leave)
        case Lost():
            after, effects = _register(member, member.round + 1)
            return after, (Leave(member.round), *effects)
        case Over():
            return member._replace(phase=Phase.OVER), ()


def _register(member: Member, number: int) -> tuple[Member, tuple[Effect, ...]]:
    registered = member._replace(phase=Phase.REGISTERED, round=number)
    return registered, (Register(number, registered.registration()),)


def _enter(member: Member, decision: Decision) -> tuple[Member, tuple[Effect, ...]]:
    """Come to the step with which an epoch begins, and form its group."""
    if member.number not in decision.members:
        return _register(member, decision.epoch + 1)
    effects: tuple[Effect, ...] = ()
    if member.number in decision.holders:
        if member.version < decision.version:
            assert member.complete
            effects = (Commit(member.version),)
        member = _begin_with(member, decision)
    member = member._replace(decision=decision, phase=Phase.FORMING)
    if decision.version >= member.steps and decision.holders == decision.members:
        return member._replace(phase=Phase.DONE), (*effects, Finish())
    return member, (*effects, Form(decision))


def _begin_with(member: Member, decision: Decision) -> Member:
    """Have the state with which an epoch begins."""
    return member._replace(
        version=decision.version,
        held=decision.epoch,
        complete=False,
        stop=False,
        steps=decision.steps or member.steps,
    )


def _commit(member: Member, *, leave: bool) -> tuple[Member, tuple[Effect, ...]]:
    step = member.version
    steps = step + 1 if member.stop else member.steps
    member = member._replace(version=step + 1, complete=False, stop=False, steps=steps)
    if leave:
        member, effects = _register(member, member.round + 1)
        return member, (Commit(step), Leave(member.round - 1), *effects)
    member, effects = _next_step(member)
    return member, (Commit(step), *effects)


def _next_step(member: Member) -> tuple[Member, tuple[Effect, ...]]:
    if member.version >= member.steps:  # a checkpoint may have more than are asked for
        return member._replace(phase=Phase.DONE), (Leave(member.round), Finish())
    return member._replace(phase=Phase.REDUCING), (Reduce(member.version),)
