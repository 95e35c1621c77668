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
from typing import NoReturn

from torch.distributed import ProcessGroup

from gradwire._engine_errors import backend_failure, is_over
from gradwire.ddp.faults.collective_log import group_of
from gradwire.ddp.faults.participants import Participant
from gradwire.ddp.faults.protocol import all_took_part, may_finish
from gradwire.ddp.faults.resynchronizer import UNDECIDED_TEXT, Resynchronizer
from gradwire.ddp.faults.waiting import first_failure, work_in_flight
from gradwire.errors import BrokenGroupError, DistributedError, HookError, ReductionError
from gradwire.recorder import failed
from gradwire.shm.register import member_of

__all__ = ["FaultDomain", "Participant"]

RESYNC_POLL_SECONDS = 2e-3
_DOMAINS: weakref.WeakKeyDictionary[ProcessGroup, FaultDomain] = weakref.WeakKeyDictionary()
_DOMAINS_LOCK = threading.Lock()
_WITH_INTERRUPTED: set[FaultDomain] = set()
"""Those with a backward that an exception ended on this rank."""

INTERRUPTED_TEXT = "backward was interrupted by an exception"


class FaultDomain(Resynchronizer):
    """The errors of a group's reducers, on all ranks. Made by `FaultDomain.of`.

    Its attributes are those of `Resynchronizer`.
    """

    @staticmethod
    def of(group: ProcessGroup) -> FaultDomain:
        """The group's domain, the same one for all of its reducers."""
        with _DOMAINS_LOCK:
            domain = _DOMAINS.get(group)
            if domain is None:
                domain = _DOMAINS[group] = FaultDomain(group)
        return domain

    @staticmethod
    def known(group: ProcessGroup) -> FaultDomain | None:
        """The group's domain, if it has one."""
        with _DOMAINS_LOCK:
            return _DOMAINS.get(group)

    def elsewhere(self) -> list[Participant]:
        """Return the reducers of this process's other groups."""
        if len(_DOMAINS) == 1:
            return []
        return [p for d in list(_DOMAINS.values()) if d is not self for p in d.participants]

    @staticmethod
    def forget(group: ProcessGroup) -> None:
        """End a group's domain, with the group: what was interrupted on it is nobody's any more."""
        with _DOMAINS_LOCK:
            domain = _DOMAINS.pop(group, None)
        if domain is not None:
            domain.broken = domain.broken or "this rank has left the group"
            _WITH_INTERRUPTED.discard(domain)

    @property
    def no_error_pending(self) -> bool:
        """Whether no error is yet to be raised, and no round of resynchronization is running."""
        return self.deferred is None and self.broken is None and not self.running

    # -- errors here -----------------------------------------------------------------------

    def fail(self, error: Exception, cause: BaseException | None = None) -> NoReturn:
        """End the running backward on every rank, and raise."""
        failed(error)
        reported = self.begin_round(f"{type(error).__name__}: {error}")
        _advance_all()
        if not self.has_store:
            self.deferred = None
            self.participants.reset()
            raise error from cause
        if self.broken is not None:
            self.raise_deferred()
        if not reported:  # another rank's error, which ended the backward on every rank
            self.deferred = None
        self.participants.start_over()
        raise error from cause

    def hook_failed(self, error: Exception, what: str) -> NoReturn:
        """Raise a failure of the group, which a hook passes on, or the hook's own error."""
        if failure := self._backend_error():
            self.give_up(self.translate(failure, what), error)
        if isinstance(error, DistributedError):
            self.fail(error)
        text = f"{what}: the communication hook raised {type(error).__name__}: {error}"
        self.fail(HookError(text), error)

    def raise_hidden(self, what: str) -> None:
        """Raise a failure of the group that a hook has hidden: its callback did not ask for it."""
        if failure := self._backend_error():
            self.give_up(self.translate(failure, what), failure)

    def _backend_error(self) -> BaseException | None:
        """What a collective of a hook failed with: its handle has it, or its group on shm."""
        if error := first_failure([work_in_flight(work) for work in self.log.works]):
            return error
        for group in (self.group, *map(group_of, self.log.elsewhere)):
            member = None if group is None else member_of(group)
            if member is not None and member.failure is not None:
                return member.failure
        return None

    def translate(self, error: BaseException, what: str) -> DistributedError:
        """A backend's failure of a collective under way, as one of ours."""
        timed_out = is_over(self.log.since, self.seconds)
        return backend_failure(self.cause(error), what, timed_out=timed_out)

    def cause(self, error: BaseException) -> BaseException:
        """What failed first: on shm, where an operation fails, those behind it only say so."""
        member = member_of(self.group)
        first = None if member is None else member.failure
        if isinstance(error, BrokenGroupError) and isinstance(first, DistributedError):
            return first
        return error

    def note_interrupted(self) -> None:
        """An exception ended a participant's backward here; `recover` reports it to the ranks."""
        _WITH_INTERRUPTED.add(self)

    def recover(self) -> None:
        """Bring all ranks out of backwards that exceptions ended here; then `raise_deferred`.

        For all groups at once: one exception may have ended backwards in several.
        """
        if not _WITH_INTERRUPTED and not self.running:
            return
        _WITH_INTERRUPTED.difference_update([d for d in _WITH_INTERRUPTED if d.orphaned])
        domains = {self, *_WITH_INTERRUPTED}
        for domain in domains:
            domain._report_interrupted()
        _advance_all()
        for domain in domains:
            domain._after_interrupted()

    def _report_interrupted(self) -> None:
        if self not in _WITH_INTERRUPTED or self.broken is not None:
            return
        if self.deferred is not None:
            return  # another rank's error has ended that backward on every rank already
        self.begin_round(UNDECIDED_TEXT if self.participants.undecided() else INTERRUPTED_TEXT)

    def _after_interrupted(self) -> None:
        """Raises nothing: the caller knows of the exception that ended the backward."""
        if self not in _WITH_INTERRUPTED:
            return
        _WITH_INTERRUPTED.discard(self)
        if self.broken is not None:
            return
        undecided = self.participants.undecided()
        if not self.diverged and any(all_took_part(end, self.positions) for end in undecided):
            # It was interrupted after this rank's statement of that round, as COMMITTING: the
            # others do not know yet that this rank has not taken their step.
            self.begin_round(UNDECIDED_TEXT)
            _advance_all()
            if self.broken is not None:
                return
        self.deferred = ReductionError(self.diverged) if self.diverged else None
        self.participants.start_over()

    # -- errors elsewhere ------------------------------------------------------------------

    def before_others(self) -> None:
        """To be called before ranks send anything that is not a reducer's.

        A rank whose backward an exception ended brings the others out of theirs: what it sent
        would meet the bucket that they wait in.

        Raises:
            DistributedError: As `raise_deferred`.
        """
        self.recover()
        self.raise_deferred()

    def raise_deferred(self) -> None:
        """Raise the error that this rank learnt of, or that the group is broken.

        Raises:
            PeerFailedError: Another rank failed.
            ReductionError: Others have taken a step that this rank has not.
            PeerLostError, CollectiveTimeoutError: The group failed.
            BrokenGroupError: It cannot be used again after an earlier error.
        """
        if self.deferred is not None:
            error, self.deferred = self.deferred, None
            if self.broken is None:
                self.participants.start_over()
            else:
                self.participants.reset()
            raise error
        if self.broken is not None:
            raise BrokenGroupError(self.broken)

    def poll(self, waiter: Participant) -> None:
        """What a wait calls from time to time: raises if another rank has reported an error.

        Not where all ranks took part in the waiter's backward: its result counts on every rank, so
        that backward is completed first.
        """
        _advance_all()
        if self.no_error_pending:
            self.look_for_deaths()
        if self.deferred is None and self.broken is None:
            return
        if self.broken is not None or not may_finish(waiter.state, waiter.end, self.positions):
            self.raise_deferred()

    def poll_lost(self, *, look: bool) -> None:
        """What a wait calls that only the group's failure ends; `look`: for ended ranks, too."""
        if self.broken is None:
            self.hear_of_loss()
        if self.broken is None and look:
            self.look_for_deaths()
        if self.broken is not None:
            self.raise_deferred()

    def poll_known(self, waiter: Participant) -> None:
        """As `poll`, but only where something is known here: without an error it costs nothing."""
        if not self.no_error_pending:
            self.poll(waiter)


def _advance_all() -> None:
    """Take part in whatever any group of this process resynchronizes, until nothing is left.

    One step of each in turn, none inside another: two ranks of two groups may come to them in
    opposite orders, and each would wait for the other.
    """
    while True:
        unfinished = [d for d in list(_DOMAINS.values()) if d.advance()]
        if not unfinished:
            return
        time.sleep(RESYNC_POLL_SECONDS)
