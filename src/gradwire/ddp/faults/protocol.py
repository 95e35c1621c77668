"""Protocol by which ranks resynchronize after an error.

The *position* of a rank is the number of collectives that it has sent on the group. A rank that
fails, or learns that another has failed, publishes a statement: its error, its position and its
recent collectives. From then on it starts no collective of its own. When all statements are
published, ranks behind the furthest one join the collectives that they missed, with zeros
(`missing`), so that every collective that a rank waits in ends. All ranks then publish the outcome
and continue.

A position is the backend's count of collectives, which has the same meaning on all ranks. A count
of forwards would not: a rank that ran one more forward (a copy, a caught error) would appear one
step ahead, and the others would use zeros as gradients.

The result of a backward counts on all ranks or on none. Its last message is sent only if everything
before it has succeeded. A rank may therefore keep its result if every rank has sent that message
with its own data (`all_took_part`).

The functions here send nothing. The tests run them on a model of the ranks, through every order of
events.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from gradwire.ddp.faults.backward_state import BackwardState
from gradwire.errors import BrokenGroupError


class Phase(Enum):
    """Phase of a rank in a resynchronization."""

    STATED = "the rank has published its statement and waits for the others' statements"
    JOINING = "the rank has joined missed collectives and waits for all communication to end"
    JOINED = "the rank has published its outcome and waits for the others' outcomes"
    DONE = "all ranks are in step, or know that they cannot be"


def next_phase(phase: Phase, *, stated: bool, ended: bool, joined: bool) -> Phase:
    """Return the next phase, or the same one if its condition is not met.

    Args:
        phase: Current phase of this rank.
        stated: True if all ranks' statements are published.
        ended: True if all communication of this rank has ended or cannot end.
        joined: True if all ranks' outcomes are published.

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
"""Collectives with their numbers in the group."""


@dataclass(frozen=True)
class Statement:
    """Statement that a rank publishes when it begins to resynchronize.

    Attributes:
        error: Error of this rank; None if it only learnt of another rank's error.
        position: Number of collectives that the rank has sent on the group.
        sent: Collectives that other ranks may still wait in.
        elsewhere: `position` and `sent` for other groups that a communication hook used, by name.
        undecided: Position of the last message of a backward that an exception ended after that
            message.
    """

    error: str | None
    position: int
    sent: Numbered
    elsewhere: Mapping[str, tuple[int, Numbered]]
    undecided: int | None = None


def missing(position: int, statements: Sequence[tuple[int, Numbered]]) -> list[Any]:
    """Return the collectives that a rank must join to be in step with the furthest rank.

    Args:
        position: Position of this rank.
        statements: Position and sent collectives of each rank.

    Raises:
        BrokenGroupError: Ranks sent different collectives, or a missing one is in no log.

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
            f"collectives that no reducer sent were in progress (numbers {unknown})"
        )
    return [known[number] for number in needed]


def missing_elsewhere(name: str, position: int, statements: Sequence[Statement]) -> list[Any]:
    """Return the result of `missing` for another group that this rank is a member of."""
    stated = [s.elsewhere[name] for s in statements if name in s.elsewhere]
    return missing(position, [(position, ()), *stated])


def all_took_part(end: int, positions: Sequence[int]) -> bool:
    """Return True if all ranks sent a collective before their statements, with their own data.

    Example:
        >>> all_took_part(4, [4, 5]), all_took_part(4, [3, 5])
        (True, False)
    """
    return end <= min(positions)


def may_finish(state: BackwardState, end: int, positions: Sequence[int]) -> bool:
    """Return True if a waiting backward may be completed although a rank has failed.

    Args:
        state: State of the backward.
        end: Position of its last message.
        positions: Stated position of each rank.
    """
    return state is BackwardState.COMMITTING and all_took_part(end, positions)


def diverged(undecided: Sequence[int | None], positions: Sequence[int]) -> list[int]:
    """Return the ranks that missed, because of an exception, a step that others may have taken.

    Args:
        undecided: Position of the last message of an undecided backward on each rank, or None.
        positions: Stated position of each rank.

    Example:
        >>> diverged([None, 4], [4, 4]), diverged([None, 4], [3, 4])
        ([1], [])
    """
    ends = enumerate(undecided)
    return [rank for rank, end in ends if end is not None and all_took_part(end, positions)]
