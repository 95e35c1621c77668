"""Fault domain of a process group: errors of its reducers, on all of its ranks.

All reducers of a group share an error channel and a log of collectives. A rank that fails reports
its error, and all ranks resynchronize (see `protocol`): each raises an error, and every reducer of
the group starts over in the same state. If all ranks have taken part in the current backward, a
rank first completes it and raises before the next one. If the group itself fails, ranks cannot
resynchronize over it, and it stays broken.

A rank may be in several groups. While it waits in one, it polls all of them. Groups that are
resynchronizing advance together, step by step, so ranks may begin with any of them.

Messages outside of reducers (buffers, comparisons of models, join()) are completed first if another
rank has failed, and the error is raised after them. Only a failure of the group itself ends such a
wait early.
"""

from __future__ import annotations

import threading
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch.distributed import ProcessGroup, Work

from gradwire._engine_errors import backend_failure, is_over
from gradwire._groups import COMPARED_CALLS, OBSERVERS, find_store
from gradwire.ddp.faults.collective_log import (
    UNDECIDED_TEXT,
    CollectiveLog,
    LogMode,
    Participant,
    Participants,
    ResynchronizationRound,
)
from gradwire.ddp.faults.error_channel import (
    ErrorChannel,
    backend_errors,
    timeout_of,
    wait_future,
    wait_work,
)
from gradwire.ddp.faults.protocol import all_took_part, may_finish
from gradwire.errors import (
    BrokenGroupError,
    CollectiveTimeoutError,
    DistributedError,
    HookError,
    PeerLostError,
    ReductionError,
)
from gradwire.recorder import record_error
from gradwire.shm import shm_backend_of

RESYNC_POLL_SECONDS = 2e-3
_NO_STORE = (
    "the process group has no store for error reports between ranks: if one rank fails, the "
    "others wait until their timeout. Make the group with init_process_group or new_group"
)
INTERRUPTED_TEXT = "backward was interrupted by an exception"
_DOMAINS: weakref.WeakKeyDictionary[ProcessGroup, FaultDomain] = weakref.WeakKeyDictionary()
_DOMAINS_LOCK = threading.Lock()
_WITH_INTERRUPTED: set[FaultDomain] = set()
"""Domains with a backward that an exception ended on this rank."""


class FaultDomain:
    """Errors of a group's reducers, on all ranks. Made by `FaultDomain.of`."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = weakref.ref(group)  # a domain must not keep its group alive
        self.channel = ErrorChannel(group)
        if not self.channel.has_store:
            warnings.warn(_NO_STORE, stacklevel=4)
        self.participants = Participants()
        # held while anything is sent: it keeps a single order, and keeps the position constant
        # while it is stated
        self.lock = threading.RLock()
        self.log = CollectiveLog(group)
        # functions of `collectives` were called on the group: their order relative to buckets
        # counts, on all ranks
        self.has_collectives = False
        self.seconds = timeout_of(group)
        # future of the last hook call if its callbacks may send more collectives: nothing else is
        # sent on the group before it is done
        self.hook_future: torch._C.Future[Any] | None = None
        self._round: ResynchronizationRound | None = None
        self._positions: list[int] = []  # of each rank, in the last round
        self._diverged = ""  # message about ranks that missed a step before the last round
        self._deferred: DistributedError | None = None  # another rank's error, yet to be raised
        # reason that the group cannot be used again
        self.broken: str | None = None
        # last error of another rank that was raised: a hook that waits may raise it again
        self._raised: DistributedError | None = None

    @staticmethod
    def of(group: ProcessGroup) -> FaultDomain:
        with _DOMAINS_LOCK:
            domain = _DOMAINS.get(group)
            if domain is None:
                domain = _DOMAINS[group] = FaultDomain(group)
        return domain

    @staticmethod
    def known(group: ProcessGroup) -> FaultDomain | None:
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
    def group(self) -> ProcessGroup:
        group = self._group()
        assert group is not None
        return group

    @property
    def _no_error_pending(self) -> bool:
        return self._deferred is None and self.broken is None and self._round is None

    # -- rounds ----------------------------------------------------------------------------

    def connect(self) -> None:
        """Connect the group's error channel, under a random name that rank 0 broadcasts."""
        # A name from a count of groups or wrappers would differ on a rank that makes one more, such
        # as a copy of the model on rank 0.
        # the first collective of every rank on the group: when ranks verify the first model, or
        # else in its first backward
        if self.channel.name:
            return
        with self.lock:
            since, (token, work) = time.monotonic(), self.channel.start_connecting(self.group)
            try:
                work.wait()
            except RuntimeError as error:
                timed_out = is_over(since, self.seconds)
                failure = backend_failure(error, "the first message", timed_out=timed_out)
                self.give_up(failure, error)
            self.channel.connect(self.group, token)

    def begin_round(self, error: str) -> bool:
        """Begin a round with this rank's error; return False if a round had already begun."""
        if self.broken is not None:
            raise BrokenGroupError(self.broken)
        if not self.channel.has_store:
            self._break(BrokenGroupError(f"{error}; {_NO_STORE}"))
            return True
        self.connect()
        with self.lock:
            if self._round is not None:
                return False
            self._round = self._new_round(error)
        return True

    def _new_round(self, error: str | None) -> ResynchronizationRound:
        return ResynchronizationRound(
            self.group, self.channel, self.log, self.participants, error, self.seconds
        )

    def _advance(self) -> bool:
        """Advance a round of any rank without waiting; return True if there is more to do."""
        group = self._group()
        # Without a store, the group was destroyed, but is still referenced.
        if group is None or find_store(group) is None:
            return False
        if not self.channel.connected or self.broken is not None:
            return False
        # Non-blocking: a thread polls all groups while it holds the lock of one, so two threads
        # could deadlock. The thread that holds the lock advances this round.
        if not self.lock.acquire(blocking=False):
            return self._round is not None
        try:
            if self._round is None:
                if (failure := self.channel.broken()) is not None:
                    raise failure
                if not self.channel.error_reported():
                    return False
                self._round = self._new_round(None)
            if not self._round.advance():
                return True
            self._end_round(self._round)
        except DistributedError as error:
            self._break(error)
        finally:
            self.lock.release()
        return False

    def _end_round(self, done: ResynchronizationRound) -> None:
        self.channel.next_round()
        self._round, self._positions, self._diverged = None, done.positions, done.diverged
        self.log.clear()
        self.hook_future = None
        COMPARED_CALLS.clear()  # ranks that failed have compared fewer
        if (error := done.error()) is None:
            return
        self._deferred = error
        if isinstance(error, BrokenGroupError):
            self.broken = str(error)
        else:
            record_error(error, group=self._group())

    def _look(self, look: Callable[[], PeerLostError | None]) -> None:
        if not self.channel.connected or not self.lock.acquire(blocking=False):
            return
        try:
            if (failure := look()) is not None:
                raise failure
        except PeerLostError as error:  # also of a store that is gone
            self._break(error)
        finally:
            self.lock.release()

    def give_up(self, error: DistributedError, cause: BaseException | None) -> NoReturn:
        """Break the group after a failure of the group itself, and raise the error."""
        self._break(error)
        self._deferred = None
        self.participants.reset()
        raise error from cause

    def _break(self, error: DistributedError) -> None:
        record_error(error)
        self.broken, self._deferred = f"the group failed earlier: {error}", error
        self._round = None
        if self.channel.connected:
            self.channel.report_broken(str(error))

    # -- errors here -----------------------------------------------------------------------

    def fail(self, error: Exception, cause: BaseException | None = None) -> NoReturn:
        """End the running backward on every rank and raise the error."""
        record_error(error)
        reported = self.begin_round(f"{type(error).__name__}: {error}")
        _resynchronize_all()
        if not self.channel.has_store:
            self._deferred = None
            self.participants.reset()
            raise error from cause
        if self.broken is not None:
            self.raise_deferred()
        if not reported:  # another rank's error, which ended the backward on every rank
            self._deferred = None
        self.participants.start_over()
        raise error from cause

    def hook_failed(self, error: Exception, what: str) -> NoReturn:
        """Raise the failure of the group that made a hook fail, or else the hook's own error."""
        if error is self._raised:
            raise error
        self.raise_hidden(what, error)
        if isinstance(error, DistributedError):
            self.fail(error)
        text = f"{what}: the communication hook raised {type(error).__name__}: {error}"
        self.fail(HookError(text), error)

    def raise_hidden(self, what: str, error: Exception | None = None) -> None:
        """Raise a failure of the group, which a hook's callback has ignored or made an error of."""
        if failure := self.log.failure():
            self.give_up(self.translate(failure, what), error or failure)

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
        _WITH_INTERRUPTED.add(self)

    def report_interrupted(self) -> None:
        """End on all ranks, in all groups, the backwards that exceptions ended on this one."""
        # Call `raise_deferred` afterwards.
        if not _WITH_INTERRUPTED and self._round is None:
            return
        _WITH_INTERRUPTED.difference_update([d for d in _WITH_INTERRUPTED if d._group() is None])
        domains = {self, *_WITH_INTERRUPTED}
        for domain in domains & _WITH_INTERRUPTED:
            # a deferred error of another rank has already ended that backward on every rank
            if domain.broken is None and domain._deferred is None:
                undecided = domain.participants.undecided()
                domain.begin_round(UNDECIDED_TEXT if undecided else INTERRUPTED_TEXT)
        _resynchronize_all()
        for domain in domains & _WITH_INTERRUPTED:
            domain._after_interrupted()

    def _after_interrupted(self) -> None:
        # raises nothing: the caller has seen the exception itself
        _WITH_INTERRUPTED.discard(self)
        if self.broken is not None:
            return
        undecided = self.participants.undecided()
        if not self._diverged and any(all_took_part(end, self._positions) for end in undecided):
            # The backward was COMMITTING when this rank made its statement of that round, and was
            # interrupted later. The other ranks do not know yet that this rank missed the step.
            self.begin_round(UNDECIDED_TEXT)
            _resynchronize_all()
            if self.broken is not None:
                return
        self._deferred = ReductionError(self._diverged) if self._diverged else None
        self.participants.start_over()

    # -- errors elsewhere ------------------------------------------------------------------

    def before_others(self) -> None:
        """Recover and raise pending errors before a message that does not belong to a reducer."""
        # if an exception ended a backward here, the other ranks still wait in a bucket of it,
        # which the message would be matched with
        self.report_interrupted()
        self.raise_deferred()

    def raise_deferred(self) -> None:
        """Raise the error reported by another rank, or the reason that the group is broken."""
        if self._deferred is not None:
            self._raised = error = self._deferred
            self._deferred = None
            if self.broken is None:
                self.participants.start_over()
            else:
                self.participants.reset()
            raise error
        if self.broken is not None:
            raise BrokenGroupError(self.broken)

    def poll(self, waiter: Participant) -> None:
        """Complete a resynchronization that has begun, and raise its error. Called by waits."""
        _resynchronize_all()
        if self._no_error_pending:
            self._look(self.channel.death)
        if self._deferred is None and self.broken is None:
            return
        # if all ranks took part in the waiter's backward, it counts on every rank: it ends first
        if self.broken is not None or not may_finish(waiter.state, waiter.end, self._positions):
            self.raise_deferred()

    def poll_lost(self, *, look: bool) -> None:
        """Raise if the group has failed; with `look`, also check for ranks that have ended."""
        if self.broken is None:
            self._look(self.channel.broken)
        if self.broken is None and look:
            self._look(self.channel.death)
        if self.broken is not None:
            self.raise_deferred()

    def poll_known(self, waiter: Participant) -> None:
        """Call `poll` only if an error is already known on this rank, to save time without one."""
        if not self._no_error_pending:
            self.poll(waiter)


def _live(group: ProcessGroup) -> list[FaultDomain]:
    """Return the domains whose errors a collective on a group may raise."""
    own = _DOMAINS.get(group)
    domains = list(_DOMAINS.values())
    return [d for d in domains if d is own or d.broken is None or d._deferred is not None]


def poll_all(group: ProcessGroup) -> None:
    """Complete resynchronizations, and raise their errors. Called by waits of no reducer."""
    _resynchronize_all()
    for domain in _live(group):
        if domain._no_error_pending:
            domain._look(domain.channel.death)
        domain.raise_deferred()


def _observe(group: ProcessGroup, collective: Callable[..., Work], *args: Any) -> Work:
    """Call a collective of `gradwire.collectives`, as the reducers' own ones are called."""
    # if an exception ended a backward here, it would meet a bucket that other ranks wait in. It may
    # be on another group than the reducers': a rank that waits in it must learn of their errors
    domains = _live(group)
    if not domains:
        return collective(*args)
    poll, own = partial(poll_all, group), _DOMAINS.get(group, domains[0])
    with own.lock:
        for domain in domains:
            domain.before_others()
        own.has_collectives |= own._group() is group
        hook = own.hook_future if own._group() is group else None
        # in backward, callbacks of a hook may still send: that must come first on all ranks
        in_backward = torch._C._current_graph_task_id() != -1
        if hook and in_backward and (late := wait_future(hook, poll, own.seconds)):
            own.give_up(own.translate(late, "a communication hook"), late)
        with LogMode([d.log for d in domains], poll, [group]):
            return collective(*args)


OBSERVERS.append(_observe)


def _resynchronize_all() -> None:
    """Advance the resynchronizations of all groups of this process until all are done."""
    # Each advances by one step in turn: two ranks may begin with different groups and would
    # otherwise wait for each other.
    while True:
        unfinished = [d for d in list(_DOMAINS.values()) if d._advance()]
        if not unfinished:
            return
        time.sleep(RESYNC_POLL_SECONDS)


LOST = (PeerLostError, CollectiveTimeoutError, BrokenGroupError)
"""Errors after which a group cannot be used again. After a mismatch it can."""


def wait_for_message(
    group: ProcessGroup,
    work: Work,
    what: str,
    *,
    on_cpu: bool,
    since: float | None = None,
    from_all: bool = False,
) -> None:
    """Wait for a message; if the group fails, mark it as broken and report that to other ranks."""
    # If it is not `on_cpu`, the current stream waits. A message `from_all` needs data from all
    # ranks: a rank that has ended is lost. The root of a broadcast may end before other ranks have
    # received.
    domain = FaultDomain.known(group)
    since = time.monotonic() if since is None else since
    if domain is None:  # no reducer on this group: there are no error reports
        with backend_errors(group, what, since):
            work.wait()
        return
    poll = partial(domain.poll_lost, look=from_all)
    try:
        with backend_errors(group, what, since):
            if error := wait_work(work, poll, on_cpu=on_cpu, seconds=domain.seconds):
                raise domain.cause(error)
    except LOST as failure:
        if domain.broken is None:
            domain.give_up(failure, failure.__cause__)
        raise
