"""Counts of training forwards without a backward: they differ between ranks out of step."""

from __future__ import annotations

import weakref

MODULUS = 64
"""Modulus of the counts sent: float32 then adds their squares over 4,096 ranks exactly."""


class Forward:
    """One forward. The nodes of its outputs reference it, so it lives as long as its graph."""

    __slots__ = ("__weakref__", "number")

    def __init__(self, number: int) -> None:
        self.number = number


class Forwards:
    """Counter of skipped forwards: a backward reached a later forward, but never these.

    A rank that continues with its next batch after a forward, for instance because its loss is NaN,
    is a step ahead of the others from then on. Forwards that a program runs only for their result
    are not counted: a forward before the first reduction, one whose outputs are released before
    the next forward ends (the loss of a step is still in a variable then), and one whose outputs
    are kept until after the step.

    If a program chooses among several forwards, ranks skip different numbers of forwards, but run
    equally many: ranks are in different steps only if both numbers differ.

    Attributes:
        skipped: Number of forwards skipped in the steps reduced so far.

    Example:
        >>> forwards = Forwards()
        >>> forwards.commit()  # the first step
        >>> forwards.begin() and None  # the result is not kept
        >>> first, second = forwards.begin(), forwards.begin()
        >>> forwards.reach(second.number)
        >>> forwards.count()  # the first forward's graph may still be part of the loss
        (0, 3)
        >>> del first
        >>> forwards.count()
        (1, 3)
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Return to the initial state, on all ranks."""
        self.skipped = self._last = self._reached = self._first = 0
        self._open: dict[int, weakref.ref[Forward]] = {}
        self._counting = False

    def begin(self) -> Forward:
        """Record a forward with outputs at which a backward may begin."""
        if self._open:
            self._open = {n: ref for n, ref in self._open.items() if ref() is not None}
        self._last += 1
        forward = Forward(self._last)
        self._open[forward.number] = weakref.ref(forward)
        return forward

    def reach(self, number: int) -> None:
        """Record that a backward has reached an output of a forward."""
        if self._open.pop(number, None) is not None:
            self._reached = max(self._reached, number)

    @property
    def begun(self) -> int:
        """Number of forwards begun since the first reduction."""
        return self._last - self._first if self._counting else 0

    def count(self) -> tuple[int, int]:
        """Return the numbers to send: forwards known to be skipped by now, and all forwards."""
        if not self._counting:
            return 0, 0
        return (self.skipped + self._gone()) % MODULUS, self.begun % MODULUS

    def commit(self) -> None:
        """Record that the backward was reduced."""
        if self._counting:
            self.skipped += self._gone()
        else:
            self._counting, self._first = True, self._last
        self._open.clear()

    def _gone(self) -> int:
        if not self._open:  # the usual case
            return 0
        return sum(ref() is None for number, ref in self._open.items() if number < self._reached)
