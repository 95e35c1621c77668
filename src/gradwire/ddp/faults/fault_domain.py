"""Fault domain of a process group: errors of its reducers, on all of its ranks.

All reducers of a group share an error channel and a log of collectives. A rank that fails reports
its error, and all ranks resynchronize (see `protocol`): each raises an error, and every reducer of
the group starts over in the same state. If all ranks have taken part in the current backward, a
rank first completes it and raises before the next one. If the group itself fails, ranks cannot
resynchronize over it, and it stays broken.

A rank may be in several groups. While it waits in one, it polls all of them. Groups that are
resynchronizing advance together, step by step, so ranks may begin with any of them.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any, NoReturn

from torch.distributed import ProcessGroup

from gradwire._engine_errors import backend_failure, is_over
from gradwire.ddp.faults.collective_log import group_of
from gradwire.ddp.faults.participants import Participant
from gradwire.ddp.faults.protocol import all_took_part, may_finish
from gradwire.ddp.faults.resynchronizer import UNDECIDED_TEXT, Resynchronizer
from gradwire.ddp.faults.waiting import first_failure, work_in_flight
from gradwire.errors import BrokenGroupError, DistributedError, HookError, ReductionError
from gradwire.recorder import record_error
from gradwire.shm import shm_backend_of

RESYNC_POLL_SECONDS = 2e-3
_DOMAINS: weakref.WeakKeyDictionary[ProcessGroup, FaultDomain] = weakref.WeakKeyDictionary()
_DOMAINS_LOCK = threading.Lock()
_WITH_INTERRUPTED: set[FaultDomain] = set()
"""Domains with a backward that an exception ended on this rank."""

INTERRUPTED_TEXT = "backward was interrupted by an exception"


class FaultDomain(Resynchronizer):
    """Errors of a group's reducers, on all ranks. Made by `FaultDomain.of`.

    See `Resynchronizer` for the attributes.
    """

    @staticmethod
    def of(group: ProcessGroup) -> FaultDomain:
        """Return the group's domain, which all of its reducers share."""
        with _DOMAINS_LOCK:
            domain = _DOMAINS.get(group)
            if domain is None:
                domain = _DOMAINS[group] = FaultDomain(group)
        return domain

    @staticmethod
    def known(group: ProcessGroup) -> FaultDomain | None:
        """Return the group's domain, or None if it has none."""
        with _DOMAINS_LOCK:
            return _DOMAINS.get(group)

    def elsewhere(self) -> Sequence[Any]:
        """Return the reducers of this process's other groups."""
        if len(_DOMAINS) == 1:
            return ()
        return [p for d in list(_DOMAINS.values()) if d is not self for p in d.participants]

    @staticmethod
    def forget(group: ProcessGroup) -> None:
        """Remove a group's domain, with its interrupted backwards, when the group ends."""
        with _DOMAINS_LOCK:
            domain = _DOMAINS.pop(group, None)
        if domain is not None:
            domain.broken = domain.broken or "this rank has left the group"
            _WITH_INTERRUPTED.discard(domain)

    @property
    def no_error_pending(self) -> bool:
        """True if no error is waiting to be raised and no resynchronization is running."""
        return self.deferred is None and self.broken is None and not self.running

    # -- errors here -----------------------------------------------------------------------

    def fail(self, error: Exception, cause: BaseException | None = None) -> NoReturn:
        """End the running backward on every rank and raise the error."""
        record_error(error)
        reported = self.begin_round(f"{type(error).__name__}: {error}")
        _resynchronize_all()
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
        """Raise the failure of the group that made a hook fail, or else the hook's own error."""
        if failure := self._backend_error():
            self.give_up(self.translate(failure, what), error)
        if isinstance(error, DistributedError):
            self.fail(error)
        text = f"{what}: the communication hook raised {type(error).__name__}: {error}"
        self.fail(HookError(text), error)

    def raise_hidden(self, what: str) -> None:
        """Raise a failure of the group that a hook's callback has ignored."""
        if failure := self._backend_error():
            self.give_up(self.translate(failure, what), failure)

    def _backend_error(self) -> BaseException | None:
        """Return the failure of a hook's collective, from its handle or its shm group, or None."""
        if error := first_failure([work_in_flight(work) for work in self.log.works]):
            return error
        for group in (self.group, *map(group_of, self.log.elsewhere)):
            member = None if group is None else shm_backend_of(group)
            if member is not None and member.failure is not None:
                return member.failure
        return None

    def translate(self, error: BaseException, what: str) -> DistributedError:
        """Translate a backend's failure of a collective in progress to a DistributedError."""
        timed_out = is_over(self.log.since, self.seconds)
        return backend_failure(self.cause(error), what, timed_out=timed_out)

    def cause(self, error: BaseException) -> BaseException:
        """Return the first failure: on shm, operations after a failed one only report that fact."""
        member = shm_backend_of(self.group)
        first = None if member is None else member.failure
        if isinstance(error, BrokenGroupError) and isinstance(first, DistributedError):
            return first
        return error

    def note_interrupted(self) -> None:
        """Record that an exception ended a participant's backward, for `report_interrupted`."""
        _WITH_INTERRUPTED.add(self)

    def report_interrupted(self) -> None:
        """End on all ranks the backwards that exceptions ended on this one.

        Covers all groups, because one exception may end backwards in several. Call `raise_deferred`
        afterwards.
        """
        if not _WITH_INTERRUPTED and not self.running:
            return
        _WITH_INTERRUPTED.difference_update([d for d in _WITH_INTERRUPTED if d.orphaned])
        domains = {self, *_WITH_INTERRUPTED}
        for domain in domains:
            domain._report_interrupted()
        _resynchronize_all()
        for domain in domains:
            domain._after_interrupted()

    def _report_interrupted(self) -> None:
        if self not in _WITH_INTERRUPTED or self.broken is not None:
            return
        if self.deferred is not None:
            return  # another rank's error has already ended that backward on every rank
        self.begin_round(UNDECIDED_TEXT if self.participants.undecided() else INTERRUPTED_TEXT)

    def _after_interrupted(self) -> None:
        """Finish `report_interrupted`. Raises nothing: the caller has seen the exception itself."""
        if self not in _WITH_INTERRUPTED:
            return
        _WITH_INTERRUPTED.discard(self)
        if self.broken is not None:
            return
        undecided = self.participants.undecided()
        if not self.diverged and any(all_took_part(end, self.positions) for end in undecided):
            # The backward was COMMITTING when this rank made its statement of that round, and was
            # interrupted later. The other ranks do not know yet that this rank missed the step.
            self.begin_round(UNDECIDED_TEXT)
            _resynchronize_all()
            if self.broken is not None:
                return
        self.deferred = ReductionError(self.diverged) if self.diverged else None
        self.participants.start_over()

    # -- errors elsewhere ------------------------------------------------------------------

    def before_others(self) -> None:
        """Recover and raise pending errors before a message that does not belong to a reducer.

        If an exception ended a backward here, the other ranks still wait in a bucket of it, which
        the message would be matched with.

        Raises:
            DistributedError: An error of `raise_deferred`.
        """
        self.report_interrupted()
        self.raise_deferred()

    def raise_deferred(self) -> None:
        """Raise the error reported by another rank, or the reason that the group is broken.

        Raises:
            PeerFailedError: Another rank failed.
            ReductionError: Other ranks have taken a step that this rank has not.
            PeerLostError, CollectiveTimeoutError: The group failed.
            BrokenGroupError: The group cannot be used again after an earlier error.
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
        """Raise if another rank has reported an error. Called periodically by waits.

        Completes a resynchronization that has begun, which blocks.

        If all ranks took part in the waiter's backward, return instead: its result counts on every
        rank, so it is completed first.
        """
        _resynchronize_all()
        if self.no_error_pending:
            self.look_for_deaths()
        if self.deferred is None and self.broken is None:
            return
        if self.broken is not None or not may_finish(waiter.state, waiter.end, self.positions):
            self.raise_deferred()

    def poll_lost(self, *, look: bool) -> None:
        """Raise if the group has failed; with `look`, also check for ranks that have ended."""
        if self.broken is None:
            self.hear_of_loss()
        if self.broken is None and look:
            self.look_for_deaths()
        if self.broken is not None:
            self.raise_deferred()

    def poll_known(self, waiter: Participant) -> None:
        """Call `poll` only if an error is already known on this rank, to save time without one."""
        if not self.no_error_pending:
            self.poll(waiter)


def _resynchronize_all() -> None:
    """Advance the resynchronizations of all groups of this process until all are done.

    Each advances by one step in turn. Two ranks may begin with different groups and would
    otherwise wait for each other.
    """
    while True:
        unfinished = [d for d in list(_DOMAINS.values()) if d.advance()]
        if not unfinished:
            return
        time.sleep(RESYNC_POLL_SECONDS)
