"""One fault domain per process group: what its reducers' errors mean on all of its ranks.

All reducers of a group share an error channel and a log of collectives. A rank that fails reports
it, and all ranks resynchronize (see `resynchronisation`): each raises, and every reducer of the
group starts over, so that the ranks are equal. A rank that hears of it while its own backward is
one that all took part in finishes that first, and raises before the next. When the group itself
failed there is nothing to resynchronize over: it is said to be broken from then on.

A rank may be in several groups. While it waits in one it polls all, and all that are
resynchronizing advance together, step by step, so that ranks may come to them in any order.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor
from torch.distributed import BroadcastOptions, ProcessGroup, Work

from gradwire.ddp.faults.backward_state import BackwardState
from gradwire.ddp.faults.collective_log import CollectiveLog, Entry, group_named
from gradwire.ddp.faults.error_channel import ErrorChannel, store_of
from gradwire.ddp.faults.resynchronisation import (
    Statement,
    all_took_part,
    may_finish,
)
from gradwire.ddp.faults.round import Round
from gradwire.ddp.faults.waiting import Pending, engine_failure, first_failure, pending_work
from gradwire.ddp.group import message_device, timeout_of
from gradwire.errors import (
    BrokenGroupError,
    DistributedError,
    HookError,
    PeerFailedError,
    ReductionError,
)
from gradwire.shm.register import member_of

__all__ = ["FaultDomain", "Participant"]

TOKEN_BYTES = 16
RESYNC_POLL_SECONDS = 2e-3
_DOMAINS: weakref.WeakKeyDictionary[ProcessGroup, FaultDomain] = weakref.WeakKeyDictionary()
_DOMAINS_LOCK = threading.Lock()
_INTERRUPTED: set[FaultDomain] = set()
"""Those with a backward that an exception ended on this rank."""

INTERRUPTED = "backward was interrupted by an exception"
UNDECIDED = (
    "backward was interrupted by an exception after its last message: ranks that reduced gradients "
    "in that step have taken a step that this rank has not; give all ranks the same parameters"
)


class Participant(Protocol):
    """A reducer's backward, as its fault domain sees it.

    Attributes:
        state: Where its backward is.
        end: The position of its last message, while COMMITTING or UNDECIDED.
    """

    state: BackwardState
    end: int

    def pending(self) -> list[Pending]:
        """What it has under way."""
        ...

    def start_over(self) -> None:
        """Forget the running backward and all that was learnt: ranks are equal then."""
        ...

    def reset(self) -> None:
        """Forget the running backward."""
        ...


class FaultDomain:
    """The errors of a group's reducers, on all ranks. Made by `FaultDomain.of`.

    Attributes:
        lock: Held while anything is sent, so that the order is one, and the position stands still
            while it is stated.
        log: What was sent.
        seconds: The group's timeout.
        chain: What the hook that was called last returned, if it may send more in callbacks.
    """

    def __init__(self, group: ProcessGroup) -> None:
        store_of(group)  # raises where there is none
        self._group = weakref.ref(group)  # the group keeps its domain, not the other way round
        self.lock = threading.RLock()
        self.log = CollectiveLog()
        self.seconds = timeout_of(group)
        self._references: list[weakref.ref[Participant]] = []
        self._channel: ErrorChannel | None = None
        self._token: tuple[Tensor, Work] | None = None
        self._round: Round | None = None
        self._positions: list[int] = []
        self._diverged = ""
        self._waiting: DistributedError | None = None
        self._broken: str | None = None
        self._small: list[Work] = []
        self.chain: torch._C.Future[Any] | None = None

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
        reference = weakref.ref(participant, self._references.remove)
        if reference not in self._references:
            self._references.append(reference)

    def others(self, than: Participant) -> Sequence[Participant]:
        """The group's other reducers on this rank."""
        if len(self._references) == 1:
            return ()
        return [p for p in self._participants if p is not than]

    @property
    def _participants(self) -> list[Participant]:
        return [p for reference in list(self._references) if (p := reference()) is not None]

    def connect(self) -> None:
        """Agree on a name for the group's channel: every rank's first message on the group.

        Once for all reducers: where the ranks verify the first model, or else in its first
        backward. A later call returns at once.
        """
        if self._channel is not None:
            return
        with self.lock:
            group = self.group
            if self._token is None:  # else an exception ended the wait for it
                mine = torch.frombuffer(bytearray(os.urandom(TOKEN_BYTES)), dtype=torch.uint8)
                token = mine.to(message_device(group))
                options = BroadcastOptions()
                options.rootRank = 0
                self._token = token, group.broadcast([token], options)
            token, work = self._token
            try:
                work.wait()
            except RuntimeError as error:
                self.give_up(engine_failure(error, "the first message", timed_out=False), error)
            self._channel = ErrorChannel(group, bytes(token.tolist()).hex())

    @property
    def group(self) -> ProcessGroup:
        """The group."""
        group = self._group()
        assert group is not None
        return group

    @property
    def clear(self) -> bool:
        """Whether no error waits to be raised, and none is being dealt with."""
        return self._waiting is None and self._broken is None and self._round is None

    def sent(self, entry: Entry, work: Work | None = None) -> None:
        """Log a collective that has just been sent; `work` if no participant keeps it."""
        self.log.add(self.group, entry)
        if work is not None:
            self._small.append(work)

    def position(self) -> int:
        """The number of the last collective that this rank sent."""
        return self.log.position(self.group)

    def committed(self, end: int) -> None:
        """All ranks have sent the collective of this number."""
        self.log.forget(end)
        self._small.clear()

    # -- errors here -----------------------------------------------------------------------

    def fail(self, error: Exception, cause: BaseException | None = None) -> NoReturn:
        """End the running backward on every rank, and raise."""
        stated = self._state(f"{type(error).__name__}: {error}")
        _advance_all()
        if self._broken is not None:
            self.raise_waiting()
        if not stated:  # another rank's error, which ended the backward on every rank
            self._waiting = None
        self._start_over()
        raise error from cause

    def hook_failed(self, error: Exception, what: str) -> NoReturn:
        """Tell an engine's failure, which a hook passes on, from the hook's own."""
        if failure := self._engine_error():
            self.give_up(self.translate(failure, what), error)
        if isinstance(error, DistributedError):
            self.fail(error)
        text = f"{what}: the communication hook raised {type(error).__name__}: {error}"
        self.fail(HookError(text), error)

    def give_up(self, error: DistributedError, cause: BaseException | None) -> NoReturn:
        """The group itself failed: there is nothing to resynchronize over."""
        self._break(error)
        self._waiting = None
        self._reset()
        raise error from cause

    def translate(self, error: BaseException, what: str) -> DistributedError:
        """An engine's failure of a collective under way, as one of ours."""
        timed_out = time.monotonic() - self.log.since >= self.seconds
        return engine_failure(error, what, timed_out=timed_out)

    def note_interrupted(self) -> None:
        """An exception ended a participant's backward here; the ranks hear of it in `recover`."""
        _INTERRUPTED.add(self)

    def recover(self) -> None:
        """Bring all ranks out of backwards that exceptions ended here; then `raise_waiting`.

        For all groups at once: one exception may have ended backwards in several.
        """
        if not _INTERRUPTED and self._round is None:
            return
        domains = {self, *_INTERRUPTED}
        for domain in domains:
            domain._state_interrupted()
        _advance_all()
        for domain in domains:
            domain._after_interrupted()

    def _state_interrupted(self) -> None:
        if self not in _INTERRUPTED or self._broken is not None:
            return
        if self._waiting is not None:
            return  # another rank's error has ended that backward on every rank already
        self._state(UNDECIDED if self._undecided() else INTERRUPTED)

    def _undecided(self) -> list[int]:
        """The ends of backwards whose step other ranks may have taken.

        None where another reducer was interrupted with them: that one's backward, which is the
        same, ends with an error on the other ranks too.
        """
        if any(p.state is BackwardState.INTERRUPTED for p in self._participants):
            return []
        return [p.end for p in self._participants if p.state is BackwardState.UNDECIDED]

    def _after_interrupted(self) -> None:
        """Raises nothing where the exception that ended the backward has said enough."""
        if self not in _INTERRUPTED:
            return
        _INTERRUPTED.discard(self)
        if self._broken is not None:
            return
        undecided = self._undecided()
        if not self._diverged and any(all_took_part(end, self._positions) for end in undecided):
            self._state(UNDECIDED)  # it was interrupted in that round: the others do not know
            _advance_all()
            if self._broken is not None:
                return
        self._waiting = ReductionError(self._diverged) if self._diverged else None
        self._start_over()

    # -- errors elsewhere ------------------------------------------------------------------

    def raise_waiting(self) -> None:
        """Raise what has become known.

        Raises:
            PeerFailedError: Another rank failed.
            ReductionError: Others have taken a step that this rank has not.
            PeerLostError, CollectiveTimeoutError: The group failed.
            BrokenGroupError: It cannot be used again after an earlier error.
        """
        if self._waiting is not None:
            error, self._waiting = self._waiting, None
            if self._broken is None:
                self._start_over()
            else:
                self._reset()
            raise error
        if self._broken is not None:
            raise BrokenGroupError(self._broken)

    def poll(self, waiter: Participant) -> None:
        """What a wait calls from time to time: raises if another rank has reported an error.

        Not where all ranks took part in the waiter's backward: that is finished first.
        """
        _advance_all()
        if self._waiting is None and self._broken is None:
            return
        if self._broken is not None or not may_finish(waiter.state, waiter.end, self._positions):
            self.raise_waiting()

    def poll_known(self, waiter: Participant) -> None:
        """As `poll`, but only where there is something known: costs nothing without."""
        if not self.clear:
            self.poll(waiter)

    # -- resynchronizing -------------------------------------------------------------------

    def _state(self, error: str) -> bool:
        """State this rank's error; whether it could, as a round may have begun without it."""
        if self._broken is not None:
            raise BrokenGroupError(self._broken)
        self.connect()
        with self.lock:
            if self._round is not None:
                return False
            self._round = self._new_round(error)
        return True

    def _new_round(self, error: str | None) -> Round:
        """From here on nothing is sent but what others wait in."""
        assert self._channel is not None
        group, log = self.group, self.log
        elsewhere = {
            name: (max(number for number, _ in sent), sent) for name, sent in log.elsewhere.items()
        }
        undecided = self._undecided()
        statement = Statement(
            error, log.position(group), list(log.sent), elsewhere, max(undecided, default=None)
        )
        pending = [p for participant in self._participants for p in participant.pending()]
        pending += [pending_work(w) for w in (*log.works, *self._small)]
        return Round(group, self._channel, log, statement, pending, self.seconds)

    def advance(self) -> bool:
        """Go on as far as is possible without waiting; whether there is more to do."""
        if self._channel is None or self._broken is not None or self._group() is None:
            return False
        if not self.lock.acquire(blocking=False):
            return self._round is not None  # another thread sends something
        try:
            if self._round is None:
                if (lost := self._channel.lost()) is not None:
                    raise lost
                if not self._channel.error_reported():
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

    def _end_round(self, done: Round) -> None:
        assert self._channel is not None
        self._channel.next_round()
        self._round, self._positions, self._diverged = None, done.positions, ""
        if done.diverged:
            self._diverged = f"ranks {done.diverged}: {UNDECIDED}"
        self.log.clear()
        self._small.clear()
        self.chain = None
        if done.broken is not None:
            self._broken, self._waiting = str(done.broken), done.broken
        elif done.own is None:
            told = "; ".join(f"rank {rank}: {text}" for rank, text in done.failures.items())
            self._waiting = PeerFailedError(
                f"gradients were not reduced, because of an error elsewhere. {told}"
            )

    def _break(self, error: DistributedError) -> None:
        self._broken, self._waiting, self._round = f"the group failed earlier: {error}", error, None
        if self._channel is not None:
            self._channel.report_lost(str(error))

    def _engine_error(self) -> BaseException | None:
        if error := first_failure([pending_work(work) for work in self.log.works]):
            return error
        for group in (self._group(), *map(group_named, self.log.elsewhere)):
            member = None if group is None else member_of(group)
            if member is not None and member.failure is not None:
                return member.failure
        return None

    def _start_over(self) -> None:
        for participant in self._participants:
            participant.start_over()

    def _reset(self) -> None:
        for participant in self._participants:
            participant.reset()


def _advance_all() -> None:
    """Take part in whatever any group of this process resynchronizes, until nothing is left."""
    while True:
        unfinished = [domain for domain in list(_DOMAINS.values()) if domain.advance()]
        if not unfinished:
            return
        time.sleep(RESYNC_POLL_SECONDS)
