"""State machine of a member, without I/O: which generation it is in and which step comes next.

Events go in and effects come out. `Runtime` carries the effects out; the checker in the tests does
so in every order. A *generation* is one set of members and their process group. Either all members
commit a step or none does: a member whose gradients are complete enters a barrier, and commits once
it has passed the barrier. A member that fails before leaves the generation and arrives at the next
*rendezvous*, where it reports its progress. One member closes the rendezvous with a decision, which
is written once and defines the next generation.

Correctness: a member that passed a barrier knows that all members had complete gradients. So if any
member committed a step, every member of that generation can commit it, and `decide` makes them do
so: a generation begins with the smallest step that all arrived members of the previous one can
reach, and no member is beyond it. All members with complete gradients know a request to stop, so
that either all or none commit it with the step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from enum import IntEnum
from typing import NamedTuple

from gradwire.elastic.protocol.events import (
    Arrival,
    Arrive,
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
    Seen,
    Start,
    Transfer,
    Transferred,
)


class Phase(IntEnum):
    """State of a member."""

    NEW = 0  # has not arrived yet
    ARRIVED = 1  # waits for the decision of `rendezvous`
    FORMING = 2  # forms the group of its generation
    TRANSFER = 3  # sends or receives the state
    REDUCING = 4  # computes and reduces gradients
    BARRIER = 5  # has complete gradients, and waits for the others
    DONE = 6  # has committed all steps
    OVER = 7  # others were done before it was admitted, or with another state


class Member(NamedTuple):
    """Knowledge of one member.

    A tuple, because replacing a dataclass three times per step takes 30 µs.

    Args:
        number: Number given by the store; never reused for another process.
        steps: Number of steps in all; fewer once a step is committed after which to stop.
        phase: State of the member.
        committed: Number of steps committed in its state.
        held: Last generation in which it had the state of training.
        complete: True if it has the complete gradients of step `committed`.
        rendezvous: Rendezvous at which it arrived last, or the one that decided its generation.
        decision: Decision on its current or last generation.
        stop: True if its gradients are complete and a member asked to stop after that step.
    """

    number: int
    steps: int
    phase: Phase = Phase.NEW
    committed: int = 0
    held: int = 0
    complete: bool = False
    rendezvous: int = 0
    decision: Decision | None = None
    stop: bool = False

    def arrival(self) -> Arrival:
        """Return the values with which the member arrives."""
        steps = self.committed + 1 if self.stop else self.steps
        return Arrival(self.number, self.held, self.committed, self.complete, steps)


def may_close(seen: Seen) -> bool:
    """Return True if a rendezvous need not wait for more members.

    It waits for the members of the previous generation that are alive. If no arrived member has the
    state, it waits until all members that ever had it are dead, because starting again would
    discard it. Once a member is done, the state of an earlier generation does not count: continuing
    from it would undo committed steps.
    """
    here = [r for r in seen.arrived if r.member not in seen.gone]
    if seen.previous is None:
        return bool(here) and seen.enough
    numbers = {r.member for r in here}
    if not here or any(m not in numbers | seen.gone for m in seen.previous.members):
        return False
    if any(_has_state(r, seen) for r in here):
        return True
    return not seen.finished and _holders_are_dead(seen)


def is_over(seen: Seen) -> bool:
    """Return True if a member is done and no member is left that may have the state."""
    if any(_has_state(r, seen) for r in seen.arrived if r.member not in seen.gone):
        return False
    return seen.finished and _holders_are_dead(seen)


def _has_state(arrival: Arrival, seen: Seen) -> bool:
    """Return True if a member can continue from its state."""
    if seen.finished and seen.previous is not None:
        return arrival.held == seen.previous.generation
    return arrival.held > 0


def _holders_are_dead(seen: Seen) -> bool:
    if seen.previous is None:
        return True
    # a member that arrived with the state and has been suspended since still has it
    stateless = {r.member for r in seen.arrived if not _has_state(r, seen)}
    return (stateless | seen.dead).issuperset((*seen.previous.members, *seen.previous.former))


def decide(generation: int, seen: Seen) -> Decision:
    """Return the generation of the members that have arrived and are alive."""
    here = sorted((r for r in seen.arrived if r.member not in seen.gone), key=lambda r: r.member)
    latest = max(r.held for r in here)
    if latest:
        holders = [r for r in here if r.held == latest]
        committed = min(r.committed + r.complete for r in holders)
    else:  # all members have only their own start, possibly loaded from a checkpoint
        committed = max(r.committed for r in here)
        holders = [next(r for r in here if r.committed == committed)]
    # a member that stops after this step reports so; the others report more steps
    steps = min(r.steps for r in holders if r.committed + r.complete == committed)
    first = tuple(r.member for r in holders)
    members = (*first, *(r.member for r in here if r.member not in first))
    before = seen.previous
    past: Collection[int] = () if before is None else (*before.members, *before.former)
    former = tuple(sorted({m for m in past if m not in members and m not in seen.dead}))
    return Decision(generation, members, first, committed, former, latest, steps)


def same_lineage(generation: int, other: int, source_of: Callable[[int], int]) -> bool:
    """Return True if one of two generations has its state from the other.

    Both then commit the same steps. Two members that take each other for dead may both reach the
    last step.

    Args:
        generation: One of the generations.
        other: The other generation.
        source_of: Function that returns the source of a generation, as in its decision.
    """
    first, last = sorted((generation, other))
    while last > first:
        last = source_of(last)
    return last == first


def transition(member: Member, event: Event) -> tuple[Member, tuple[Effect, ...]]:
    """Return the member after an event, and the effects to carry out in order."""
    match event:
        case Start(generation):
            return _arrive(member, generation + 1)
        case Seen():
            if member.phase is not Phase.ARRIVED or not may_close(event):
                return member, ()
            return member, (Propose(decide(member.rendezvous, event)),)
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
            after, effects = _arrive(member, member.rendezvous + 1)
            return after, (Leave(member.rendezvous), *effects)
        case Over():
            return member._replace(phase=Phase.OVER), ()


def _arrive(member: Member, number: int) -> tuple[Member, tuple[Effect, ...]]:
    arrived = member._replace(phase=Phase.ARRIVED, rendezvous=number)
    return arrived, (Arrive(number, arrived.arrival()),)


def _enter(member: Member, decision: Decision) -> tuple[Member, tuple[Effect, ...]]:
    """Continue with the step with which a generation begins, and form its group."""
    if member.number not in decision.members:
        return _arrive(member, decision.generation + 1)
    effects: tuple[Effect, ...] = ()
    if member.number in decision.holders:
        if member.committed < decision.committed:
            assert member.complete
            effects = (Commit(member.committed),)
        member = _begin_with(member, decision)
    member = member._replace(decision=decision, phase=Phase.FORMING)
    if decision.committed >= member.steps and decision.holders == decision.members:
        return member._replace(phase=Phase.DONE), (*effects, Finish())
    return member, (*effects, Form(decision))


def _begin_with(member: Member, decision: Decision) -> Member:
    """Return the member with the state with which a generation begins."""
    return member._replace(
        committed=decision.committed,
        held=decision.generation,
        complete=False,
        stop=False,
        steps=decision.steps or member.steps,
    )


def _commit(member: Member, *, leave: bool) -> tuple[Member, tuple[Effect, ...]]:
    step = member.committed
    steps = step + 1 if member.stop else member.steps
    member = member._replace(committed=step + 1, complete=False, stop=False, steps=steps)
    if leave:
        member, effects = _arrive(member, member.rendezvous + 1)
        return member, (Commit(step), Leave(member.rendezvous - 1), *effects)
    member, effects = _next_step(member)
    return member, (Commit(step), *effects)


def _next_step(member: Member) -> tuple[Member, tuple[Effect, ...]]:
    if member.committed >= member.steps:  # a checkpoint may have more steps than requested
        return member._replace(phase=Phase.DONE), (Leave(member.rendezvous), Finish())
    return member._replace(phase=Phase.REDUCING), (Reduce(member.committed),)
