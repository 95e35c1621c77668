"""What goes into a member's state machine (`protocol`), and what comes out of it: plain values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias


class Registration(NamedTuple):
    """What a member says of itself when it registers for a round.

    Args:
        member: Its number.
        held: The last epoch in which it had the state of training; 0: it has only its own start.
        version: How many steps its state has.
        complete: Whether it has the complete gradients of the next one.
        steps: How many steps the run has, once the next one is committed if it is complete.
    """

    member: int
    held: int
    version: int
    complete: bool
    steps: int = 0


class Decision(NamedTuple):
    """An epoch.

    Args:
        epoch: Its number: that of the round which made it.
        members: In the order of their ranks; the first one has the state.
        holders: Those that have the state; the others receive it.
        version: The number of steps of the state with which it begins.
        former: Members of earlier epochs that are not in this one, and may come back.
        source: The epoch that the state is from; 0: a member's own start.
        steps: How many steps the run has; 0: as many as each member was told.
    """

    epoch: int
    members: tuple[int, ...]
    holders: tuple[int, ...]
    version: int
    former: tuple[int, ...] = ()
    source: int = 0
    steps: int = 0


@dataclass(frozen=True)
class Start:
    """The member is ready; `epoch` is the last that was decided."""

    epoch: int


@dataclass(frozen=True)
class Seen:
    """What the store and the members' signs of life show of the round.

    Args:
        previous: The epoch before, if there was one.
        registered: Those that have registered.
        gone: Numbers of members that are dead, silent for too long, or done.
        dead: Those of them that will not come back.
        enough: Whether the first round need not wait for more members.
        finished: Whether a member has committed all steps.
    """

    previous: Decision | None
    registered: tuple[Registration, ...]
    gone: frozenset[int]
    dead: frozenset[int]
    enough: bool = True
    finished: bool = False


@dataclass(frozen=True)
class Decided:
    """The round that the member registered for has its decision."""

    decision: Decision


@dataclass(frozen=True)
class Formed:
    """The group is formed."""


@dataclass(frozen=True)
class Transferred:
    """The state was sent, or received."""


@dataclass(frozen=True)
class Reduced:
    """The gradients of the step are complete on this member.

    With them every member has learned whether any of them asks to `stop` after this step.
    """

    stop: bool = False


@dataclass(frozen=True)
class Passed:
    """All members were in the barrier; `leave` if one of them saw somebody who wants to join."""

    leave: bool


@dataclass(frozen=True)
class Lost:
    """The epoch's group failed: a member died, left, or is silent."""


@dataclass(frozen=True)
class Over:
    """Those that had the state are done."""


@dataclass(frozen=True)
class Register:
    """Write a registration for a round."""

    round: int
    registration: Registration


@dataclass(frozen=True)
class Propose:
    """Write a decision, if there is none for its round."""

    decision: Decision


@dataclass(frozen=True)
class Form:
    """Form the group of an epoch: `Formed` or `Lost` follows."""

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
    """Enter the barrier: `Passed` or `Lost` follows."""


@dataclass(frozen=True)
class Commit:
    """Step the optimizer with the complete gradients of a step."""

    step: int


@dataclass(frozen=True)
class Leave:
    """Leave the group of an epoch: the others' operations fail."""

    epoch: int


@dataclass(frozen=True)
class Finish:
    """Let others know that all steps are committed."""


Event: TypeAlias = Start | Seen | Decided | Formed | Transferred | Reduced | Passed | Lost | Over
Effect: TypeAlias = (
    Register | Propose | Form | Transfer | Reduce | Barrier | Commit | Leave | Finish
)
