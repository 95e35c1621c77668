"""The reducers of one process group on this rank, as its fault domain sees them."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Protocol

from gradwire.ddp.faults.backward_state import BackwardState
from gradwire.ddp.faults.waiting import InFlight

__all__ = ["Participant", "Participants"]


class Participant(Protocol):
    """A reducer's `Backward`, which is not imported here, as far as a fault domain knows it.

    Attributes:
        state: Where its backward is.
        end: The position of its last message, while COMMITTING or UNDECIDED.
    """

    state: BackwardState
    end: int

    def in_flight(self) -> list[InFlight]:
        """What it has under way."""
        ...

    def start_over(self) -> None:
        """Discard the running backward and all that was learnt: ranks are equal then."""
        ...

    def reset(self) -> None:
        """Discard the running backward."""
        ...


class Participants:
    """The reducers that exist: referenced weakly, as a module may be deleted before its group."""

    def __init__(self) -> None:
        self._references: list[weakref.ref[Participant]] = []

    def add(self, participant: Participant) -> None:
        """Add one, if it is not there."""
        reference = weakref.ref(participant, self._references.remove)
        if reference not in self._references:
            self._references.append(reference)

    def __iter__(self) -> Iterator[Participant]:
        # A copy: the garbage collector may remove a reducer, and its reference, at any time.
        return iter([p for r in list(self._references) if (p := r()) is not None])

    def others(self, than: Participant) -> Sequence[Participant]:
        """All but one."""
        if len(self._references) == 1:
            return ()
        return [p for p in self if p is not than]

    def undecided(self) -> list[int]:
        """The positions of the last messages of backwards whose step other ranks may have taken.

        None where another reducer was interrupted with them: that one's backward, which is the
        same, ends with an error on the other ranks too.
        """
        if any(p.state is BackwardState.INTERRUPTED for p in self):
            return []
        return [p.end for p in self if p.state is BackwardState.UNDECIDED]

    def in_flight(self) -> list[InFlight]:
        """What all of them have under way."""
        return [one for participant in self for one in participant.in_flight()]

    def start_over(self) -> None:
        """Call `start_over` of each."""
        for participant in self:
            participant.start_over()

    def reset(self) -> None:
        """Call `reset` of each."""
        for participant in self:
            participant.reset()
