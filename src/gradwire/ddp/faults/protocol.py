"""States of a backward, and the protocol by which ranks resynchronize after an error.

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
from types import MappingProxyType
from typing import Any

from gradwire.errors import BrokenGroupError


class BackwardState(Enum):
    """State of a reducer's backward."""

    LOCAL = "no backward is expected: gradients stay local"
    EXPECTED = "a forward was prepared and its backward has not begun"
    RUNNING = "autograd is running the backward and will signal its end"
    RUNNING_AGAIN = "like RUNNING, through outputs whose gradients were reduced before"
    SHORT = "the backward ended with gradients missing: another backward may bring them"
    AWAITING = "the backward ended and waits for its caller to finalize it with the last message"
    COMMITTING = "the last message was sent: all ranks reduce when it arrives, or none"
    INTERRUPTED = "an exception ended it before its last message"
    UNDECIDED = "an exception ended it after its last message: other ranks may have reduced"
    FINALIZED = "the caller finalized the backward while autograd was running it"
    REDUCED = "the backward is over: gradients stay local until a forward or a repeated backward"

    __hash__ = object.__hash__  # Enum.__hash__ takes ten times as long, in every transition

    @property
    def unfinished(self) -> bool:
        """True if a backward has begun, and its gradients are not all reduced."""
        kind = BackwardState
        return self not in (kind.LOCAL, kind.EXPECTED, kind.REDUCED, kind.FINALIZED)


class Event(Enum):
    """Event that changes the state of a backward."""

    PREPARE = "a forward is about to run and its backward will be reduced"
    SKIP = "all ranks skip the expected backward"
    BEGIN = "the backward reaches an output or the first gradient"
    BEGIN_AGAIN = "the backward reaches an output whose gradients were reduced before"
    END_UNTOUCHED = "the backward ended without a gradient of a parameter"
    END_SHORT = "the backward ended with gradients missing"
    END_MANUAL = "the backward ended and the caller must finalize it"
    FINALIZE = "the caller finalized the backward before it ended"
    SEND_LAST = "the last message is sent"
    COMMIT = "all messages have arrived"
    INTERRUPT = "an exception ends the backward"
    RESET = "the ranks were resynchronized after an error"

    __hash__ = object.__hash__


S, E = BackwardState, Event
_RUNNING = {
    E.END_SHORT: S.SHORT,
    E.END_MANUAL: S.AWAITING,
    E.SEND_LAST: S.COMMITTING,
    E.INTERRUPT: S.INTERRUPTED,
    E.RESET: S.REDUCED,
}
TRANSITIONS = MappingProxyType(
    {
        S.LOCAL: {E.PREPARE: S.EXPECTED, E.RESET: S.LOCAL},
        # SEND_LAST without BEGIN: a rank that has run out of inputs takes part with zeros.
        S.EXPECTED: {
            E.PREPARE: S.EXPECTED,
            E.SKIP: S.LOCAL,
            E.BEGIN: S.RUNNING,
            E.SEND_LAST: S.COMMITTING,
            E.INTERRUPT: S.INTERRUPTED,
            E.RESET: S.EXPECTED,
        },
        S.RUNNING: {**_RUNNING, E.END_UNTOUCHED: S.EXPECTED},
        S.RUNNING_AGAIN: {**_RUNNING, E.END_UNTOUCHED: S.REDUCED},
        S.SHORT: {E.BEGIN: S.RUNNING, E.INTERRUPT: S.INTERRUPTED, E.RESET: S.REDUCED},
        S.AWAITING: {E.SEND_LAST: S.COMMITTING, E.INTERRUPT: S.INTERRUPTED, E.RESET: S.REDUCED},
        S.COMMITTING: {E.COMMIT: S.REDUCED, E.INTERRUPT: S.UNDECIDED, E.RESET: S.REDUCED},
        S.INTERRUPTED: {E.RESET: S.REDUCED},
        S.UNDECIDED: {E.RESET: S.REDUCED},
        S.FINALIZED: {E.END_UNTOUCHED: S.REDUCED, E.PREPARE: S.EXPECTED, E.RESET: S.REDUCED},
        S.REDUCED: {
            E.FINALIZE: S.FINALIZED,
            E.PREPARE: S.EXPECTED,
            E.BEGIN_AGAIN: S.RUNNING_AGAIN,
            E.RESET: S.REDUCED,
        },
    }
)
"""Events that may occur in each state, and the state that follows."""


def after(state: BackwardState, event: Event) -> BackwardState:
    """Return the state that follows."""
    following = TRANSITIONS[state].get(event)
    assert following is not None, f"{event} in {state}"
    return following


class Phase(Enum):
    """Phase of a rank in a resynchronization."""

    STATED = "the rank has published its statement and waits for the others' statements"
    JOINING = "the rank has joined missed collectives and waits for all communication to end"
    JOINED = "the rank has published its outcome and waits for the others' outcomes"
    DONE = "all ranks are in step, or know that they cannot be"


def next_phase(phase: Phase, *, stated: bool, ended: bool, joined: bool) -> Phase:
    """Return the next phase, or the same one if its condition is not met."""
    # stated, joined: all ranks' statements, or outcomes, are published. ended: all communication of
    # this rank has ended or cannot end.
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
    """Statement that a rank publishes when it begins to resynchronize."""

    # None if this rank only learnt of another rank's error
    error: str | None
    # number of collectives that the rank has sent on the group
    position: int
    # collectives that other ranks may still wait in
    sent: Numbered
    # `position` and `sent` for other groups that a communication hook used, by name
    elsewhere: Mapping[str, tuple[int, Numbered]]
    # position of the last message of a backward that an exception ended after that message
    undecided: int | None = None


def missing(position: int, statements: Sequence[tuple[int, Numbered]]) -> list[Any]:
    """Return the collectives that a rank must join to be in step with the furthest rank."""
    # `statements` has the position and the sent collectives of each rank.
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


def all_took_part(end: int, positions: Sequence[int]) -> bool:
    """Return True if all ranks sent a collective before their statements, with their own data."""
    return end <= min(positions)


def may_finish(state: BackwardState, end: int, positions: Sequence[int]) -> bool:
    """Return True if a waiting backward may be completed although a rank has failed."""
    # `end` is the position of its last message.
    return state is BackwardState.COMMITTING and all_took_part(end, positions)


def diverged(undecided: Sequence[int | None], positions: Sequence[int]) -> list[int]:
    """Return the ranks that missed, because of an exception, a step that others may have taken."""
    # `undecided` has the position of the last message of an undecided backward on each rank.
    ends = enumerate(undecided)
    return [rank for rank, end in ends if end is not None and all_took_part(end, positions)]
