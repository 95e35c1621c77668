"""States of a reducer's backward, and the table of transitions between them.

The reducer (`reducer/backward.py`) and the model checker in the tests use the same table.
"""

from __future__ import annotations

from enum import Enum
from types import MappingProxyType


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
        S.AWAITING: {
            E.SEND_LAST: S.COMMITTING,
            E.INTERRUPT: S.INTERRUPTED,
            E.RESET: S.REDUCED,
        },
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
    """Return the state that follows.

    Example:
        >>> after(BackwardState.RUNNING, Event.SEND_LAST).name
        'COMMITTING'
    """
    following = TRANSITIONS[state].get(event)
    assert following is not None, f"{event} in {state}"
    return following
