"""Events and effects of a member's state machine: plain values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias


class Arrival(NamedTuple):
    """State that a member reports when it arrives at a rendezvous.

    Args:
        member: Number of the member.
        held: Last generation in which it had the state of training; 0 if it only has its own start.
        committed: Number of steps committed in its state.
        complete: True if it has the complete gradients of the next step.
        steps: Number of steps of the run, once the next one is committed if it is complete.
    """

    member: int
    held: int
    committed: int
    complete: bool
    steps: int = 0


class Decision(NamedTuple):
    """Result of a rendezvous: a generation.

    Args:
        generation: Number of the generation, equal to that of its rendezvous.
        members: Members in the order of their ranks; the first one has the state.
        holders: Members that have the state; the others receive it.
        committed: Number of steps committed in the state with which the generation begins.
        former: Members of earlier generations that are not in this one and may come back.
        source: Generation that the state is from; 0 for a member's own start.
        steps: Number of steps of the run; 0 for the number that each member was given.
    """

    generation: int
    members: tuple[int, ...]
    holders: tuple[int, ...]
    committed: int
    former: tuple[int, ...] = ()
    source: int = 0
    steps: int = 0


@dataclass(frozen=True)
class Start:
    """The member is ready; `generation` is the last one that was decided."""

    generation: int


@dataclass(frozen=True)
class Seen:
    """Observation of a rendezvous, from the store and the members' signs of life.

    Args:
        previous: Previous generation; None before the first.
        arrived: Members that have arrived.
        gone: Numbers of members that are dead, silent for too long, or done.
        dead: Members among them that will not come back.
        enough: True if the first rendezvous need not wait for more members.
        finished: True if a member has committed all steps.
    """

    previous: Decision | None
    arrived: tuple[Arrival, ...]
    gone: frozenset[int]
    dead: frozenset[int]
    enough: bool = True
    finished: bool = False


@dataclass(frozen=True)
class Decided:
    """The rendezvous at which the member has arrived has its decision."""

    decision: Decision


@dataclass(frozen=True)
class Formed:
    """Form the group of a generation; `Formed` or `Lost` follows."""


@dataclass(frozen=True)
class Transferred:
    """Send the state, or receive all of it; `Transferred` or `Lost` follows."""


@dataclass(frozen=True)
class Reduced:
    """The gradients of the step are complete on this member.

    Every member then knows whether any member asked to `stop` after this step.
    """

    stop: bool = False


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
