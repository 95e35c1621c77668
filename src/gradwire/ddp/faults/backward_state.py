"""The state of one reducer's backward: one enum, one table of what may follow what.

Pure: the reducer (`reducer/backward.py`) and the model checker of the tests use the same table.
"""

from __future__ import annotations

from enum import Enum
from types import MappingProxyType

__all__ = ["TRANSITIONS", "BackwardState", "Event", "after"]


class BackwardState(Enum):
    """Where a reducer's backward is."""

    LOCAL = "no backward is expected: gradients stay local"
    EXPECTED = "a forward was prepared, its backward has not begun"
    RUNNING = "autograd is in it, and calls when it ends"
    RUNNING_AGAIN = "as RUNNING, through outputs whose gradients were reduced before"
    SHORT = "it ended with gradients missing: another backward may bring them"
    AWAITING = "it ended, all but its last message is sent, and its caller is to finalize it"
    COMMITTING = "its last message was sent: all ranks reduce when it arrives, or none"
    INTERRUPTED = "an exception ended it before its last message"
    UNDECIDED = "an exception ended it after its last message: other ranks may have reduced"
    FINALIZED = "its caller has finalized it, and autograd is still in it"
    REDUCED = "over: gradients stay local until a forward or a repeated backward"

    __hash__ = object.__hash__  # an enum's own takes ten times as long, in every transition


class Event(Enum):
    """What happens to a backward."""

    PREPARE = "a forward is about to run whose backward is to be reduced"
    SKIP = "all ranks leave that backward out"
    BEGIN = "the first gradient, or an output, is reached"
    BEGIN_AGAIN = "an output is reached whose backward was reduced before"
    END_UNTOUCHED = "it ended without a gradient of a parameter"
    END_SHORT = "it ended with gradients missing"
    END_MANUAL = "it ended, and its caller is to finalize it"
    FINALIZE = "its caller has finalized it before it ended"
    SEND_LAST = "its last message is sent"
    COMMIT = "all messages came back"
    INTERRUPT = "an exception ends it"
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
        # SEND_LAST without BEGIN: a rank that has run out of inputs takes part with zeros
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
"""For each state, the events that may happen in it, and the state that follows."""


def after(state: BackwardState, event: Event) -> BackwardState:
    """The state that follows.

    Example:
        >>> after(BackwardState.RUNNING, Event.SEND_LAST).name
        'COMMITTING'
    """
    following = TRANSITIONS[state].get(event)
    assert following is not None, f"{event} in {state}"
    return following
