"""Training forwards that no backward has reached: ranks with other numbers are in other steps."""

from __future__ import annotations

import weakref

__all__ = ["Forward", "Forwards"]

MODULUS = 64
"""Counts are sent modulo this, so that float32 adds their squares over 4,096 ranks exactly."""


class Forward:
    """One forward; the nodes of its outputs hold it, so that it lives as long as its graph."""

    __slots__ = ("__weakref__", "number")

    def __init__(self, number: int) -> None:
        self.number = number


class Forwards:
    """Counts forwards that were skipped: a backward reached a later one, and never these.

    A rank that goes on to its next batch after a forward, as its loss is NaN for instance, is a
    step ahead of the others from then on. Not counted is what a program runs to look at its result:
    a forward before the first reduction, and one of which nothing is left when the next one ends
    (the loss of a step is still in a variable then).

    Attributes:
        skipped: How many were skipped in the steps that have been reduced.

    Example:
        >>> forwards = Forwards()
        >>> forwards.commit()  # the first step
        >>> forwards.begin() and None  # nobody keeps its result
        >>> first, second = forwards.begin(), forwards.begin()
        >>> forwards.reach(second.number)
        >>> forwards.count()  # the first one's graph may still be part of the loss
        0
        >>> del first
        >>> forwards.count()
        1
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget everything: all ranks start over."""
        self.skipped = self._last = self._reached = 0
        self._open: dict[int, weakref.ref[Forward]] = {}
        self._counting = False

    def begin(self) -> Forward:
        """Note a forward with outputs at which a backward may begin."""
        self._open = {n: ref for n, ref in self._open.items() if ref() is not None}
        self._last += 1
        forward = Forward(self._last)
        self._open[forward.number] = weakref.ref(forward)
        return forward

    def reach(self, number: int) -> None:
        """Note that a backward has reached an output of a forward."""
        if self._open.pop(number, None) is not None:
            self._reached = max(self._reached, number)

    def count(self) -> int:
        """Return the number to be sent: of forwards that are known to be skipped by now."""
        if not self._counting:
            return 0
        gone = sum(ref() is None for number, ref in self._open.items() if number < self._reached)
        return (self.skipped + gone) % MODULUS

    def commit(self) -> None:
        """Note that the backward was reduced."""
        if self._counting:
            self.skipped += sum(number < self._reached for number in self._open)
        self._open.clear()
        self._counting = True
