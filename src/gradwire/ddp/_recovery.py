"""What a rank does when it fails, when another does, and when the group does.

A rank that fails meets the others (see `_alarm`); all of them raise, and begin anew together. A
rank that hears of a failure one step ahead finishes its own step first and raises at the next.
When the group itself fails there is nothing to meet over: it is said to be broken from then on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn
from weakref import WeakMethod

from torch.distributed import ProcessGroup

from gradwire.ddp._alarm import Alarm
from gradwire.ddp._flight import Flight
from gradwire.ddp._wait import translate
from gradwire.errors import (
    BrokenGroupError,
    CollectiveTimeoutError,
    DistributedError,
    HookError,
    PeerFailedError,
    PeerLostError,
)

__all__ = ["Recovery"]


class Recovery:
    """Errors of one reducer, on all ranks.

    Args:
        group: The group.
        flight: What the running backward has under way.
        reset: A method: forget the running backward.
        start_over: A method: forget it and all that was learnt, so that all ranks are equal.
    """

    def __init__(
        self,
        group: ProcessGroup,
        flight: Flight,
        reset: Callable[[], None],
        start_over: Callable[[], None],
    ) -> None:
        self._alarm = Alarm(group)
        self._flight = flight
        self._reset, self._start_over = WeakMethod(reset), WeakMethod(start_over)
        self._deferred: PeerFailedError | None = None
        self._broken: str | None = None

    @property
    def clear(self) -> bool:
        """Whether no error waits to be raised."""
        return self._broken is None and self._deferred is None

    def raise_waiting(self) -> None:
        """Raises what could not be raised earlier.

        Raises:
            PeerFailedError: Another rank failed at the beginning of this step.
            BrokenGroupError: The group cannot be used again after an earlier error.
        """
        if self._broken is not None:
            raise BrokenGroupError(self._broken)
        if self._deferred is not None:
            error, self._deferred = self._deferred, None
            self._flight.step += 1
            self._begin_anew()
            raise error

    def look(self) -> None:
        """Raises if another rank has reported an error."""
        try:
            rung = self._alarm.rung()
        except PeerLostError as error:
            self.give_up(error, error.__cause__)
        if rung:
            self._on_alarm()

    def vote(self) -> None:
        """Returns when every rank has got this far in its backward; raises if one fails."""
        if self._deferred is None:
            self._alarm.vote(self.look)

    def fail(self, error: Exception, cause: BaseException | None = None) -> NoReturn:
        """Ends this backward on every rank, and raises."""
        self._meet(f"{type(error).__name__}: {error}")
        self._begin_anew()
        raise error from cause

    def interrupted(self) -> None:
        """Brings the other ranks out of a backward that an exception ended on this one."""
        self._meet("backward was interrupted by an exception")
        self._begin_anew()

    def hook_failed(self, error: Exception, what: str) -> NoReturn:
        """Tells an engine's failure, which a hook passes on, from the hook's own."""
        engine = translate(error, what)
        if isinstance(engine, PeerLostError | CollectiveTimeoutError):
            self.give_up(engine, error)
        if isinstance(error, DistributedError):
            self.fail(error)
        text = f"{what}: the communication hook raised {type(error).__name__}: {error}"
        self.fail(HookError(text), error)

    def give_up(self, error: DistributedError, cause: BaseException | None) -> NoReturn:
        """The group itself failed: nothing can be brought level."""
        self._broken = f"the group failed earlier: {error}"
        self._alarm.tell_lost(str(error))
        self._forget()
        raise error from cause

    def _on_alarm(self) -> None:
        """Another rank failed: raise, unless this rank's backward is one that it took part in."""
        failures, later = self._meet(None)
        told = "; ".join(f"rank {rank}: {text}" for rank, text in failures.items())
        error = PeerFailedError(
            f"gradients were not reduced, because of an error elsewhere. {told}"
        )
        if later:
            self._deferred = error  # all ranks took part in this backward: finish it first
            return
        self._begin_anew()
        raise error

    def _meet(self, error: str | None) -> tuple[dict[int, str], bool]:
        flight = self._flight
        try:
            return self._alarm.meet(error, flight.step, flight.ledger, flight.pending())
        except PeerLostError as lost:
            self.give_up(lost, lost.__cause__)
        except DistributedError as broken:
            self._broken = str(broken)
            self._forget()
            raise

    def _forget(self) -> None:
        if reset := self._reset():
            reset()

    def _begin_anew(self) -> None:
        if start_over := self._start_over():
            start_over()
