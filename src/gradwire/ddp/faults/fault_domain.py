"""One fault domain per process group: what its reducers' errors mean on all of its ranks.

All reducers of a group share an error channel and a log of collectives. A rank that fails reports
it, and all ranks resynchronize (see `protocol`): each raises, and every reducer of the group starts
over, so that the ranks are equal. A rank that learns of it during a backward in which all ranks
took part completes that first, and raises before the next. When the group itself failed, ranks
cannot resynchronize over it, and it is broken from then on.

A rank may be in several groups. While it waits in one it polls all, and all that are
resynchronizing advance together, step by step, so that ranks may come to them in any order.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch.distributed import ProcessGroup, Work

from gradwire._engine_errors import engine_failure, is_over
from gradwire.ddp.faults.collective_log import Entry, group_named
from gradwire.ddp.faults.participants import Participant, Participants
from gradwire.ddp.faults.protocol import all_took_part, may_finish
from gradwire.ddp.faults.resynchronizer import UNDECIDED, Resynchronizer
from gradwire.ddp.faults.waiting import first_failure, pending_work
from gradwire.errors import BrokenGroupError, DistributedError, HookError, ReductionError
from gradwire.shm.register import member_of

__all__ = ["FaultDomain", "Participant"]

RESYNC_POLL_SECONDS = 2e-3
_DOMAINS: weakref.WeakKeyDictionary[ProcessGroup, FaultDomain] = weakref.WeakKeyDictionary()
_DOMAINS_LOCK = threading.Lock()
_INTERRUPTED: set[FaultDomain] = set()
"""Those with a backward that an exception ended on this rank."""

INTERRUPTED = "backward was interrupted by an exception"


class FaultDomain:
    """The errors of a group's reducers, on all ranks. Made by `FaultDomain.of`.

    Attributes:
        lock: Held while anything is sent, so that the order is one, and the position stands still
            while it is stated.
        log: What was sent.
        seconds: The group's timeout.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._participants = Participants()
        self._resync = Resynchronizer(group, self._participants)
        self.lock = self._resync.lock
        self.log = self._resync.log
        self.seconds = self._resync.seconds

    @staticmethod
    def of(group: ProcessGroup) -> FaultDomain:
        """The group's domain, the same one for all of its reducers.

        Raises:
            NotSupportedError: The group has no store.
        """
        with _DOMAINS_LOCK:
            domain = _DOMAINS.get(group)
            if domain is None:
                domain = _DOMAINS[group] = FaultDomain(group)
        return domain

    def register(self, participant: Participant) -> None:
        """Let a reducer share in the group's errors. Only this rank need call."""
        self._participants.add(participant)

    def others(self, than: Participant) -> Sequence[Participant]:
        """The group's other reducers on this rank."""
        return self._participants.others(than)

    def connect(self) -> None:
        """Make the group's error channel: every rank's first message on the group.

        Once for all reducers: where the ranks verify the first model, or else in its first
        backward. A later call returns at once.
        """
        self._resync.connect()

    @property
    def clear(self) -> bool:
        """Whether no error is yet to be raised, and no round of resynchronization is running."""
        resync = self._resync
        return resync.deferred is None and resync.broken is None and not resync.running

    @property
    def chain(self) -> torch._C.Future[Any] | None:
        """What the hook that was called last returned, if it may send more in callbacks."""
        return self._resync.chain

    @chain.setter
    def chain(self, future: torch._C.Future[Any] | None) -> None:
        self._resync.chain = future

    def sent(self, entry: Entry, work: Work | None = None) -> None:
        """Log a collective that has just been sent; `work` if no participant keeps it."""
        self._resync.sent(entry, work)

    def position(self) -> int:
        """The number of the last collective that this rank sent."""
        return self.log.position(self._resync.group)

    def committed(self, end: int) -> None:
        """All ranks have sent the collective of this number."""
        self._resync.committed(end)

    # -- errors here -----------------------------------------------------------------------

    def fail(self, error: Exception, cause: BaseException | None = None) -> NoReturn:
        """End the running backward on every rank, and raise."""
        reported = self._resync.begin_round(f"{type(error).__name__}: {error}")
        _advance_all()
        if self._resync.broken is not None:
            self.raise_waiting()
        if not reported:  # another rank's error, which ended the backward on every rank
            self._resync.deferred = None
        self._participants.start_over()
        raise error from cause

    def hook_failed(self, error: Exception, what: str) -> NoReturn:
        """Raise a failure of the group, which a hook passes on, or the hook's own error."""
        if failure := self._engine_error():
            self.give_up(self.translate(failure, what), error)
        if isinstance(error, DistributedError):
            self.fail(error)
        text = f"{what}: the communication hook raised {type(error).__name__}: {error}"
        self.fail(HookError(text), error)

    def _engine_error(self) -> BaseException | None:
        """What a collective of a hook failed with: its handle has it, or its group on shm."""
        if error := first_failure([pending_work(work) for work in self.log.works]):
            return error
        for group in (self._resync.group, *map(group_named, self.log.elsewhere)):
            member = None if group is None else member_of(group)
            if member is not None and member.failure is not None:
                return member.failure
        return None

    def give_up(self, error: DistributedError, cause: BaseException | None) -> NoReturn:
        """The group itself failed: there is nothing to resynchronize over. Raises the error."""
        self._resync.give_up(error, cause)

    def translate(self, error: BaseException, what: str) -> DistributedError:
        """An engine's failure of a collective under way, as one of ours."""
        timed_out = is_over(self.log.since, self.seconds)
        return engine_failure(error, what, timed_out=timed_out)

    def note_interrupted(self) -> None:
        """An exception ended a participant's backward here; `recover` reports it to the ranks."""
        _INTERRUPTED.add(self)

    def recover(self) -> None:
        """Bring all ranks out of backwards that exceptions ended here; then `raise_waiting`.

        For all groups at once: one exception may have ended backwards in several.
        """
        if not _INTERRUPTED and not self._resync.running:
            return
        domains = {self, *_INTERRUPTED}
        for domain in domains:
            domain._report_interrupted()
        _advance_all()
        for domain in domains:
            domain._after_interrupted()

    def _report_interrupted(self) -> None:
        if self not in _INTERRUPTED or self._resync.broken is not None:
            return
        if self._resync.deferred is not None:
            return  # another rank's error has ended that backward on every rank already
        self._resync.begin_round(UNDECIDED if self._participants.undecided() else INTERRUPTED)

    def _after_interrupted(self) -> None:
        """Raises nothing: the caller knows of the exception that ended the backward."""
        if self not in _INTERRUPTED:
            return
        _INTERRUPTED.discard(self)
        resync = self._resync
        if resync.broken is not None:
            return
        undecided = self._participants.undecided()
        if not resync.diverged and any(all_took_part(end, resync.positions) for end in undecided):
            # It was interrupted after this rank's statement of that round, as COMMITTING: the
            # others do not know yet that this rank has not taken their step.
            self._resync.begin_round(UNDECIDED)
            _advance_all()
            if resync.broken is not None:
                return
        resync.deferred = ReductionError(resync.diverged) if resync.diverged else None
        self._participants.start_over()

    # -- errors elsewhere ------------------------------------------------------------------

    def raise_waiting(self) -> None:
        """Raise the error that this rank learnt of, or that the group is broken.

        Raises:
            PeerFailedError: Another rank failed.
            ReductionError: Others have taken a step that this rank has not.
            PeerLostError, CollectiveTimeoutError: The group failed.
            BrokenGroupError: It cannot be used again after an earlier error.
        """
        resync = self._resync
        if resync.deferred is not None:
            error, resync.deferred = resync.deferred, None
            if resync.broken is None:
                self._participants.start_over()
            else:
                self._participants.reset()
            raise error
        if resync.broken is not None:
            raise BrokenGroupError(resync.broken)

    def poll(self, waiter: Participant) -> None:
        """What a wait calls from time to time: raises if another rank has reported an error.

        Not where all ranks took part in the waiter's backward: its result counts on every rank, so
        that backward is completed first.
        """
        _advance_all()
        resync = self._resync
        if resync.deferred is None and resync.broken is None:
            return
        if resync.broken is not None or not may_finish(waiter.state, waiter.end, resync.positions):
            self.raise_waiting()

    def poll_known(self, waiter: Participant) -> None:
        """As `poll`, but only where something is known here: without an error it costs nothing."""
        if not self.clear:
            self.poll(waiter)


def _advance_all() -> None:
    """Take part in whatever any group of this process resynchronizes, until nothing is left.

    One step of each in turn, none inside another: two ranks of two groups may come to them in
    opposite orders, and each would wait for the other.
    """
    while True:
        unfinished = [d for d in list(_DOMAINS.values()) if d._resync.advance()]
        if not unfinished:
            return
        time.sleep(RESYNC_POLL_SECONDS)
