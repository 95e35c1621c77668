"""Training forwards that no backward has reached: ranks with other numbers are in other steps."""

from __future__ import annotations

import weakref

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
    a forward before the first reduction, one of which nothing is left when the next one ends
    (the loss of a step is still in a variable then), and one that is kept until after the step.

    Where a program chooses among several forwards, ranks skip others, but run equally many: they
    are in other steps only if both numbers differ.

    Attributes:
        skipped: How many were skipped in the steps that have been reduced.

    Example:
        >>> forwards = Forwards()
        >>> forwards.commit()  # the first step
        >>> forwards.begin() and None  # nobody keeps its result
        >>> first, second = forwards.begin(), forwards.begin()
        >>> forwards.reach(second.number)
        >>> forwards.count()  # the first one's graph may still be part of the loss
        (0, 3)
        >>> del first
        >>> forwards.count()
        (1, 3)
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget everything: all ranks start over."""
        self.skipped = self._last = self._reached = self._first = 0
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

    @property
    def begun(self) -> int:
        """How many have begun since the first reduction."""
        return self._last - self._first if self._counting else 0

    def count(self) -> tuple[int, int]:
        """Return the numbers to be sent: of forwards known to be skipped by now, and of all."""
        if not self._counting:
            return 0, 0
        return (self.skipped + self._gone()) % MODULUS, self.begun % MODULUS

    def commit(self) -> None:
        """Note that the backward was reduced."""
        if self._counting:
            self.skipped += self._gone()
        else:
            self._counting, self._first = True, self._last
        self._open.clear()

    def _gone(self) -> int:
        return sum(ref() is None for number, ref in self._open.items() if number < self._reached)
