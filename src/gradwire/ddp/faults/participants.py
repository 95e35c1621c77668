"""Reducers of one process group on this rank, as a fault domain uses them."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from gradwire.ddp.faults.protocol import BackwardState
from gradwire.ddp.faults.waiting import InFlight


class Participant(Protocol):
    """Interface of a reducer's `Backward` for a fault domain, which does not import it.

    Attributes:
        state: State of the backward.
        end: Position of the last message, while COMMITTING or UNDECIDED.
    """

    state: BackwardState
    end: int

    def in_flight(self) -> list[InFlight]:
        """Return the communication in progress."""
        ...

    def start_over(self) -> None:
        """Discard the running backward and all state learned from earlier ones, on all ranks."""
        ...

    def reset(self) -> None:
        """Discard the running backward."""
        ...


class Participants:
    """Existing reducers, referenced weakly: a module may be deleted before its group."""

    def __init__(self) -> None:
        self._references: list[weakref.ref[Participant]] = []

    def add(self, participant: Participant) -> None:
        """Add a participant, unless it was added before."""
        reference = weakref.ref(participant, self._references.remove)
        if reference not in self._references:
            self._references.append(reference)

    def __iter__(self) -> Iterator[Participant]:
        # A copy: the garbage collector may remove a reducer and its reference at any time.
        return iter([p for r in list(self._references) if (p := r()) is not None])

    def others(self, than: Participant) -> Sequence[Any]:
        """Return all participants but one; all are of its class."""
        if len(self._references) == 1:
            return ()
        return [p for p in self if p is not than]

    def undecided(self) -> list[int]:
        """Return the last-message positions of backwards whose step other ranks may have taken.

        Empty if another reducer was interrupted in the same backward, because that backward then
        also fails on the other ranks.
        """
        if any(p.state is BackwardState.INTERRUPTED for p in self):
            return []
        return [p.end for p in self if p.state is BackwardState.UNDECIDED]

    def in_flight(self) -> list[InFlight]:
        """Return the communication in progress of all participants."""
        return [one for participant in self for one in participant.in_flight()]

    def start_over(self) -> None:
        """Call `start_over` on each participant."""
        for participant in self:
            participant.start_over()

    def reset(self) -> None:
        """Call `reset` on each participant."""
        for participant in self:
            participant.reset()
