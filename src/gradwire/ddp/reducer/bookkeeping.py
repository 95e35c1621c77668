"""Parts of a backward's state, each changed by its own methods only."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, TypeVar

from torch import Tensor
from torch.distributed import Work

from gradwire.ddp.reducer.launch import Launcher
from gradwire.ddp.reducer.tally import Forwards

Sharer = TypeVar("Sharer")
Message = Callable[[Forwards], Tensor | None]


class Turn(Generic[Sharer]):
    """Position among the reducers of a group that share a backward of autograd.

    Attributes:
        taken: True if the position is known, or no backward is running.
        predecessors: Reducers that send their buckets first.
    """

    def __init__(self) -> None:
        self.taken = True
        self.predecessors: set[Sharer] = set()

    def wait(self) -> None:
        """Begin a backward without a position."""
        self.taken = False

    def take(self, earlier: Sequence[Sharer]) -> None:
        """Follow the ones that already have a position."""
        self.taken = True
        if earlier:
            self.predecessors.update(earlier)


class ArrivalOrder:
    """Order in which gradients arrive, until a backward has determined the buckets for good.

    Args:
        rebuild: True if buckets are reassigned in that order.

    Attributes:
        arrivals: Indices of parameters in order of arrival in this backward; None once buckets are
            final.
        complete: True from the end of the first reduced backward until buckets are final.
        rebuilt: True if buckets have been reassigned.
    """

    def __init__(self, *, rebuild: bool) -> None:
        self.rebuild = rebuild
        self.arrivals: list[int] | None = []
        self.complete = self.rebuilt = False

    def note(self, index: int) -> None:
        """Record an arrival."""
        if self.arrivals is not None:
            self.arrivals.append(index)

    def finish(self) -> bool:
        """Record that the backward was reduced; return True if it is the first one."""
        if self.arrivals is None or self.complete:
            return False
        self.complete = True
        return True

    def with_others(self, first: Iterable[int]) -> list[int]:
        """Return the order of arrival, then parameters without a gradient in their first order."""
        return [*dict.fromkeys([*(self.arrivals or ()), *first])]

    def settle(self) -> None:
        """Record that buckets are final."""
        self.arrivals, self.complete = None, False

    def start_over(self) -> None:
        """Record the order of another backward."""
        self.arrivals, self.complete = [], False

    def clear(self) -> None:
        """Forget the arrivals of this backward."""
        if self.arrivals is not None:
            self.arrivals.clear()


class LocalBackwards:
    """Running backwards of forwards under `no_sync`, while another backward is expected.

    Attributes:
        running: Number of them.
    """

    def __init__(self) -> None:
        self.running = 0
        self._came: list[int] = []

    def begin(self) -> None:
        """Count a backward that begins."""
        self.running += 1

    def end(self) -> None:
        """Count a backward that has ended."""
        self.running -= 1
        self._came.clear()

    def note(self, index: int) -> None:
        """Record a gradient that may belong to one of them, or to the expected backward."""
        if self.running:
            self._came.append(index)

    def take(self) -> Sequence[int]:
        """Return the gradients that arrived before the expected backward began, once."""
        came, self._came = self._came, []
        return came


class ReplicaSums:
    """Sums over the ranks of what the wrapper sends to compare replicas, at the end of a backward.

    Attributes:
        backwards: Number of backwards reduced since replicas were sent; the same on all ranks.
    """

    def __init__(self) -> None:
        self.backwards = 0
        self._message: weakref.WeakMethod[Message] | None = None
        self._sums: tuple[Launcher, Tensor, Work] | None = None

    def send_from(self, message: Message) -> None:
        """Set the method that returns the message, or None if none is due."""
        self._message = weakref.WeakMethod(message)

    def send(self, launcher: Launcher, forwards: Forwards, *, joined: bool) -> None:
        """Count a reduced backward, and begin to add up the messages if they are due.

        Ranks are together then: their next forwards may differ in number.

        Args:
            launcher: Sender.
            forwards: Counts of this rank's forwards.
            joined: True if a rank has run out of input: it has old parameters.
        """
        message = None if self._message is None else self._message()
        if message is not None and not joined and (own := message(forwards)) is not None:
            self._sums = launcher, *launcher.start_sum(own)
            self.backwards = 0
        self.backwards += 1

    def receive(self) -> Tensor | None:
        """Return the sum that the last backward began, once; None if there is none."""
        if self._sums is None:
            return None
        launcher, sums, work = self._sums
        launcher.wait_small(work)
        self._sums = None
        return sums

    def clear(self) -> None:
        """Forget what is in flight."""
        self._sums = None
