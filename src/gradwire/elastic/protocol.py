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
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, TypeAlias


class Arrival(NamedTuple):
    """State that a member reports when it arrives at a rendezvous."""

    member: int
    # last generation in which it had the state of training; 0 if it only has its own start
    held: int
    committed: int  # steps committed in its state
    complete: bool  # it has the complete gradients of the next step
    steps: int = 0  # of the run, once the next one is committed if it is complete


class Decision(NamedTuple):
    """Result of a rendezvous: a generation."""

    generation: int  # its number, equal to that of its rendezvous
    members: tuple[int, ...]  # in the order of their ranks; the first one has the state
    holders: tuple[int, ...]  # have the state; the others receive it
    committed: int  # steps committed in the state with which the generation begins
    # members of earlier generations that are not in this one and may come back
    former: tuple[int, ...] = ()
    source: int = 0  # generation that the state is from; 0 for a member's own start
    steps: int = 0  # of the run; 0 for the number that each member was given


@dataclass(frozen=True)
class Start:
    """The member is ready; `generation` is the last one that was decided."""

    generation: int


@dataclass(frozen=True)
class Seen:
    """Observation of a rendezvous, from the store and the members' signs of life."""

    previous: Decision | None  # generation before; None before the first
    arrived: tuple[Arrival, ...]
    gone: frozenset[int]  # members that are dead, silent for too long, or done
    dead: frozenset[int]  # members among them that will not come back
    enough: bool = True  # the first rendezvous need not wait for more members
    finished: bool = False  # a member has committed all steps


@dataclass(frozen=True)
class Decided:
    """The rendezvous at which the member has arrived has its decision."""

    decision: Decision


@dataclass(frozen=True)
class Formed:
    """The group of the generation is formed."""


@dataclass(frozen=True)
class Transferred:
    """The state is sent, or received as a whole."""


@dataclass(frozen=True)
class Reduced:
    """The gradients of the step are complete on this member."""

    stop: bool = False  # as every member then knows, one asked to stop after this step


@dataclass(frozen=True)
class Passed:
    """All members entered the barrier; `leave` is set if one of them saw a newcomer."""

    leave: bool


@dataclass(frozen=True)
class Lost:
    """The generation's group failed: a member died, left, or is silent."""


@dataclass(frozen=True)
class Over:
    """The members that had the state are done."""


@dataclass(frozen=True)
class Arrive:
    """Write an arrival for a rendezvous."""

    rendezvous: int
    arrival: Arrival


@dataclass(frozen=True)
class Propose:
    """Write a decision, unless its rendezvous has one."""

    decision: Decision


@dataclass(frozen=True)
class Form:
    """Form the group of a generation: `Formed` or `Lost` follows."""

    decision: Decision


@dataclass(frozen=True)
class Transfer:
    """Send the state, or receive it as a whole: `Transferred` or `Lost` follows."""

    decision: Decision


@dataclass(frozen=True)
class Reduce:
    """Compute and add up the gradients of a step: `Reduced` or `Lost` follows."""

    step: int


@dataclass(frozen=True)
class Barrier:
    """Enter the barrier; `Passed` or `Lost` follows."""


@dataclass(frozen=True)
class Commit:
    """Step the optimizer with the complete gradients of a step."""

    step: int


@dataclass(frozen=True)
class Leave:
    """Leave the group of a generation; the other members' operations fail."""

    generation: int


@dataclass(frozen=True)
class Finish:
    """Report that all steps are committed."""


Event: TypeAlias = Start | Seen | Decided | Formed | Transferred | Reduced | Passed | Lost | Over
Effect: TypeAlias = Arrive | Propose | Form | Transfer | Reduce | Barrier | Commit | Leave | Finish


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
    """Knowledge of one member."""

    # a tuple, because replacing a dataclass three times per step takes 30 µs
    number: int  # given by the store; never reused for another process
    steps: int  # in all; fewer once a step is committed after which to stop
    phase: Phase = Phase.NEW
    committed: int = 0  # steps committed in its state
    held: int = 0  # last generation in which it had the state of training
    complete: bool = False  # it has the complete gradients of step `committed`
    rendezvous: int = 0  # where it arrived last, or which decided its generation
    decision: Decision | None = None  # on its current or last generation
    stop: bool = False  # its gradients are complete, and a member asked to stop after that step

    def arrival(self) -> Arrival:
        """Return the values with which the member arrives."""
        steps = self.committed + 1 if self.stop else self.steps
        return Arrival(self.number, self.held, self.committed, self.complete, steps)

    def arrive(self, number: int) -> tuple[Member, tuple[Effect, ...]]:
        """Arrive at a rendezvous."""
        arrived = self._replace(phase=Phase.ARRIVED, rendezvous=number)
        return arrived, (Arrive(number, arrived.arrival()),)

    def begin(self, decision: Decision) -> Member:
        """Take the state with which a generation begins."""
        return self._replace(
            committed=decision.committed,
            held=decision.generation,
            complete=False,
            stop=False,
            steps=decision.steps or self.steps,
        )

    def next_step(self) -> tuple[Member, tuple[Effect, ...]]:
        """Reduce the gradients of the next step, or finish."""
        if self.committed >= self.steps:  # a checkpoint may have more steps than requested
            return self._replace(phase=Phase.DONE), (Leave(self.rendezvous), Finish())
        return self._replace(phase=Phase.REDUCING), (Reduce(self.committed),)


def may_close(seen: Seen) -> bool:
    """Return True if a rendezvous need not wait for more members."""
    here = [r for r in seen.arrived if r.member not in seen.gone]
    if seen.previous is None:
        return bool(here) and seen.enough
    # wait for the members of the previous generation that are alive
    numbers = {r.member for r in here}
    if not here or any(m not in numbers | seen.gone for m in seen.previous.members):
        return False
    if any(_has_state(r, seen) for r in here):
        return True
    # starting again would discard the state, unless all members that ever had it are dead
    return not seen.finished and _holders_are_dead(seen)


def is_over(seen: Seen) -> bool:
    """Return True if a member is done and no member is left that may have the state."""
    if any(_has_state(r, seen) for r in seen.arrived if r.member not in seen.gone):
        return False
    return seen.finished and _holders_are_dead(seen)


def _has_state(arrival: Arrival, seen: Seen) -> bool:
    """Return True if a member can continue from its state."""
    # continuing from an earlier generation's state would undo committed steps
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
    """Return True if one of two generations has its state from the other."""
    # both then commit the same steps; two members that take each other for dead may both reach the
    # last step
    first, last = sorted((generation, other))
    while last > first:
        last = source_of(last)
    return last == first


def transition(member: Member, event: Event) -> tuple[Member, tuple[Effect, ...]]:
    """Return the member after an event, and the effects to carry out in order."""
    effects: tuple[Effect, ...] = ()
    match event:
        case Start(generation):
            return member.arrive(generation + 1)
        case Seen():
            if member.phase is not Phase.ARRIVED or not may_close(event):
                return member, ()
            return member, (Propose(decide(member.rendezvous, event)),)
        case Decided(decision):
            if member.number not in decision.members:
                return member.arrive(decision.generation + 1)
            if member.number in decision.holders:
                if member.committed < decision.committed:
                    assert member.complete
                    effects = (Commit(member.committed),)
                member = member.begin(decision)
            member = member._replace(decision=decision, phase=Phase.FORMING)
            if decision.committed >= member.steps and decision.holders == decision.members:
                return member._replace(phase=Phase.DONE), (*effects, Finish())
            return member, (*effects, Form(decision))
        case Formed():
            assert member.decision is not None
            if len(member.decision.holders) < len(member.decision.members):
                return member._replace(phase=Phase.TRANSFER), (Transfer(member.decision),)
            return member.next_step()
        case Transferred():
            assert member.decision is not None
            return member.begin(member.decision).next_step()
        case Reduced(stop):
            return member._replace(complete=True, stop=stop, phase=Phase.BARRIER), (Barrier(),)
        case Passed(leave):
            step = member.committed
            steps = step + 1 if member.stop else member.steps
            member = member._replace(committed=step + 1, complete=False, stop=False, steps=steps)
            if leave:
                left = member.rendezvous
                member, effects = member.arrive(left + 1)
                return member, (Commit(step), Leave(left), *effects)
            member, effects = member.next_step()
            return member, (Commit(step), *effects)
        case Lost():
            after, effects = member.arrive(member.rendezvous + 1)
            return after, (Leave(member.rendezvous), *effects)
        case Over():
            return member._replace(phase=Phase.OVER), ()
