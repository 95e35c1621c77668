"""What ranks decide after an error, from the statements of all. Integers and names only.

The protocol. Every rank counts the collectives of the group: its *position*. A rank that fails, or
learns that another has, publishes a statement: its error, its position and the collectives it sent
lately. It sends nothing more. When all statements are there, ranks behind the furthest one take
part in what they missed, with zeros (`missing`), so that every collective that a rank waits in
ends. Then all publish whether that worked, and go on.

A position is the backend's count of collectives, which has the same meaning on all ranks. The
number of forwards has not: a rank that ran one forward more (a copy, a caught error) would look one
step ahead, and the others would take zeros for gradients.

The result of a backward counts on all ranks or on none: its last message is sent only when nothing
before it has failed, so that a rank may keep its result if every rank has sent that message for
real, with its own data (`all_took_part`). Nothing here moves a byte: the tests run the same
functions on a model of the ranks, through every order in which things can happen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from gradwire.ddp.faults.backward_state import BackwardState
from gradwire.errors import BrokenGroupError

__all__ = [
    "Phase",
    "Statement",
    "all_took_part",
    "diverged",
    "may_finish",
    "missing",
    "missing_elsewhere",
    "next_phase",
]


class Phase(Enum):
    """How far a rank is in resynchronizing."""

    STATED = "it has published its statement, and waits for the others' statements"
    JOINING = "it has joined what it missed, and waits for all that is under way"
    JOINED = "it has published how that went, and waits for the others' outcomes"
    DONE = "all ranks are in step, or know that they cannot be"


def next_phase(phase: Phase, *, stated: bool, ended: bool, joined: bool) -> Phase:
    """The next phase, or the same.

    Args:
        phase: This rank's.
        stated: Whether all ranks' statements are there.
        ended: Whether everything that this rank has under way has ended, or cannot.
        joined: Whether all ranks' outcomes are there.

    Example:
        >>> next_phase(Phase.STATED, stated=True, ended=False, joined=False).name
        'JOINING'
    """
    if phase is Phase.STATED and stated:
        return Phase.JOINING
    if phase is Phase.JOINING and ended:
        return Phase.JOINED
    if phase is Phase.JOINED and joined:
        return Phase.DONE
    return phase


Numbered = Sequence[tuple[int, Any]]
"""Collectives with their numbers in a group."""


@dataclass(frozen=True)
class Statement:
    """What a rank publishes when it begins to resynchronize.

    Attributes:
        error: What went wrong here; None if it only learnt of another's error.
        position: How many collectives of the group it has sent.
        sent: Those that others may still wait in.
        elsewhere: For other groups that a communication hook used, by name: the same two.
        undecided: The position of the last message of a backward that an exception ended after it.
    """

    error: str | None
    position: int
    sent: Numbered
    elsewhere: Mapping[str, tuple[int, Numbered]]
    undecided: int | None = None


def missing(position: int, statements: Sequence[tuple[int, Numbered]]) -> list[Any]:
    """The collectives that a rank has yet to join to be in step with the furthest rank.

    Args:
        position: Of this rank.
        statements: For each rank, its position and what it sent.

    Raises:
        BrokenGroupError: Ranks sent different collectives, or one is missing that nobody knows.

    Example:
        >>> missing(1, [(1, [(1, ["a"])]), (2, [(1, ["a"]), (2, ["b"])])])
        [['b']]
    """
    known: dict[int, Any] = {}
    for _, sent in statements:
        for number, collective in sent:
            if known.setdefault(number, collective) != collective:
                raise BrokenGroupError(
                    f"ranks sent different collectives before the error: {collective} and "
                    f"{known[number]} as number {number}"
                )
    needed = range(position + 1, max(at for at, _ in statements) + 1)
    if unknown := [number for number in needed if number not in known]:
        raise BrokenGroupError(
            f"collectives besides the reducer's were under way (numbers {unknown})"
        )
    return [known[number] for number in needed]


def missing_elsewhere(name: str, position: int, statements: Sequence[Statement]) -> list[Any]:
    """As `missing`, in another group that this rank is a member of."""
    stated = [s.elsewhere[name] for s in statements if name in s.elsewhere]
    return missing(position, [(position, ()), *stated])


def all_took_part(end: int, positions: Sequence[int]) -> bool:
    """Whether all ranks have sent a collective themselves, at the positions they stated.

    Example:
        >>> all_took_part(4, [4, 5]), all_took_part(4, [3, 5])
        (True, False)
    """
    return end <= min(positions)


def may_finish(state: BackwardState, end: int, positions: Sequence[int]) -> bool:
    """Whether a backward that waits here may go on, although a rank has failed.

    Args:
        state: The backward's.
        end: The position of its last message.
        positions: Those that the ranks stated.
    """
    return state is BackwardState.COMMITTING and all_took_part(end, positions)


def diverged(undecided: Sequence[int | None], positions: Sequence[int]) -> list[int]:
    """Ranks that an exception kept from a step that others may have taken.

    Args:
        undecided: For each rank, the position of an undecided backward's last message.
        positions: Those that the ranks stated.

    Example:
        >>> diverged([None, 4], [4, 4]), diverged([None, 4], [3, 4])
        ([1], [])
    """
    ends = enumerate(undecided)
    return [rank for rank, end in ends if end is not None and all_took_part(end, positions)]
