"""Log, error channel and resynchronization rounds of a process group on this rank."""

from __future__ import annotations

import os
import threading
import time
import warnings
import weakref
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from gradwire._engine_errors import backend_failure, is_over
from gradwire._groups import find_store
from gradwire.ddp.faults.collective_log import CollectiveLog
from gradwire.ddp.faults.error_channel import ErrorChannel
from gradwire.ddp.faults.participants import Participants
from gradwire.ddp.faults.protocol import Statement
from gradwire.ddp.faults.resynchronization_round import ResynchronizationRound
from gradwire.ddp.group import broadcast_options, message_device, timeout_of
from gradwire.errors import BrokenGroupError, DistributedError, PeerFailedError, PeerLostError
from gradwire.recorder import record_error

TOKEN_BYTES = 16
LIVENESS_SECONDS = 1.0
"""Interval at which a rank checks that the ranks it waits for are still running."""
EXCHANGE_SECONDS, EXCHANGE_POLL_SECONDS = 5.0, 2e-3
_NO_STORE = (
    "the process group has no store for error reports between ranks: if one rank fails, the "
    "others wait until their timeout. Make the group with init_process_group or new_group"
)
UNDECIDED_TEXT = (
    "backward was interrupted by an exception after its last message: ranks that reduced gradients "
    "in that step have taken a step that this rank has not; give all ranks the same parameters"
)


class Resynchronizer:
    """Owner of a group's resynchronization rounds and of the result of the last one.

    Args:
        group: Process group.

    Attributes:
        participants: Reducers of the group on this rank.
        lock: Lock held while anything is sent. It keeps a single order, and keeps the position
            constant while it is stated.
        log: Log of sent collectives.
        seconds: Timeout of the group.
        positions: Position of each rank, as stated in the last round.
        diverged: Message about ranks that missed a step that others took before the last round;
            empty if there are none.
        deferred: Error of another rank that this rank has yet to raise.
        broken: Reason that the group cannot be used again, or None.
        has_store: False for a group without a store, such as some groups written in Python. An
            error on one rank then breaks the group on that rank.
        name: Random name of the group, the same on all ranks; empty before `connect`.
        hook_future: Future of the last hook call if its callbacks may send more collectives.
            Nothing else is sent on the group before it is done.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self.has_store = find_store(group) is not None
        if not self.has_store:
            warnings.warn(_NO_STORE, stacklevel=4)
        self._group = weakref.ref(group)  # a domain must not keep its group alive
        self.participants = Participants()
        self._channel: ErrorChannel | None = None
        self._token: tuple[Tensor, Work] | None = None
        self._round: ResynchronizationRound | None = None
        self._next_look, self._seen_dead = 0.0, list[int]()
        self.name = "" if self.has_store else "no store"
        self.lock = threading.RLock()
        self.log = CollectiveLog(group)
        self.seconds = timeout_of(group)
        self.positions: list[int] = []
        self.diverged = ""
        self.deferred: DistributedError | None = None
        self.broken: str | None = None
        self.hook_future: torch._C.Future[Any] | None = None

    @property
    def group(self) -> ProcessGroup:
        """Process group."""
        group = self._group()
        assert group is not None
        return group

    @property
    def orphaned(self) -> bool:
        """True if the group is gone: destroyed and no longer referenced."""
        return self._group() is None

    @property
    def running(self) -> bool:
        """True if a round has begun and is not over."""
        return self._round is not None

    def connect(self) -> None:
        """Create the group's error channel under a random name that rank 0 broadcasts.

        This is the first collective of every rank on the group, once for all reducers: when ranks
        verify the first model, or else in its first backward. Later calls return at once. A name
        from a count of groups or wrappers would differ on a rank that makes one more, such as a
        copy of the model on rank 0.

        Raises:
            DistributedError: The broadcast failed; the group is broken.
        """
        if self._channel is not None or not self.has_store:
            return
        with self.lock:
            self.start_connecting()
            assert self._token is not None
            token, work = self._token
            since = time.monotonic()
            try:
                work.wait()
            except RuntimeError as error:
                timed_out = is_over(since, self.seconds)
                failure = backend_failure(error, "the first message", timed_out=timed_out)
                self.give_up(failure, error)
            self.name = bytes(token.tolist()).hex()
            self._channel = ErrorChannel(self.group, self.name)

    def start_connecting(self) -> None:
        """Send the first message of `connect`, unless it was sent before."""
        # An exception may have ended `connect` after the first message was sent.
        if self.name or self._token is not None or not self.has_store:
            return
        group = self.group
        mine = torch.frombuffer(bytearray(os.urandom(TOKEN_BYTES)), dtype=torch.uint8)
        token = mine.to(message_device(group))
        self._token = token, group.broadcast([token], broadcast_options(0))

    def exchange(self, topic: str, value: Any) -> list[Any] | None:
        """Return every rank's value through the store, or None after a few seconds.

        Used for the text of errors that all ranks raise, while collectives may be in progress.
        Return None without a store.
        """
        if not self.has_store:
            return None
        self.connect()
        assert self._channel is not None
        self._channel.publish(topic, value)
        deadline = time.monotonic() + min(EXCHANGE_SECONDS, self.seconds)
        while (values := self._channel.published(topic)) is None:
            if time.monotonic() > deadline:
                return None
            time.sleep(EXCHANGE_POLL_SECONDS)
        return values

    def begin_round(self, error: str) -> bool:
        """Begin a round with this rank's error; return False if a round had already begun.

        Raises:
            BrokenGroupError: The group cannot be used again.
        """
        if self.broken is not None:
            raise BrokenGroupError(self.broken)
        if not self.has_store:
            self._break(BrokenGroupError(f"{error}; {_NO_STORE}"))
            return True
        self.connect()
        with self.lock:
            if self._round is not None:
                return False
            self._round = self._new_round(error)
        return True

    def _new_round(self, error: str | None) -> ResynchronizationRound:
        """Make a round. From then on this rank only sends collectives that others wait in."""
        assert self._channel is not None
        group, log = self.group, self.log
        elsewhere = {
            name: (max(number for number, _ in sent), sent) for name, sent in log.elsewhere.items()
        }
        undecided = max(self.participants.undecided(), default=None)
        statement = Statement(error, log.position(), list(log.sent), elsewhere, undecided)
        in_flight = [*self.participants.in_flight(), *log.in_flight()]
        return ResynchronizationRound(group, self._channel, log, statement, in_flight, self.seconds)

    def advance(self) -> bool:
        """Advance as far as possible without waiting; return True if there is more to do.

        Begins a round if another rank has reported an error. A failure breaks the group.
        """
        group = self._group()
        # Without a store, the group was destroyed, but is still referenced.
        if group is None or find_store(group) is None:
            return False
        if self._channel is None or self.broken is not None:
            return False
        # Non-blocking: a thread polls all groups while it holds the lock of one, so two threads
        # could deadlock. The thread that holds the lock advances this round.
        if not self.lock.acquire(blocking=False):
            return self._round is not None
        try:
            if self._round is None:
                if (broken := self._channel.broken()) is not None:
                    raise broken
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

    def _end_round(self, done: ResynchronizationRound) -> None:
        assert self._channel is not None
        self._channel.next_round()
        self._round, self.positions, self.diverged = None, done.positions, ""
        if done.diverged:
            self.diverged = f"ranks {done.diverged}: {UNDECIDED_TEXT}"
        self.log.clear()
        self.hook_future = None
        if done.broken is not None:
            self.broken, self.deferred = str(done.broken), done.broken
        elif done.own is None:
            errors = "; ".join(f"rank {rank}: {text}" for rank, text in done.failures.items())
            self.deferred = PeerFailedError(
                f"gradients were not reduced, because of an error elsewhere. {errors}",
                done.failures,
            )
            record_error(self.deferred, group=self._group())

    def hear_of_loss(self) -> None:
        """Break the group if another rank has reported that it failed."""
        if self._channel is None or not self.lock.acquire(blocking=False):
            return
        try:
            if (broken := self._channel.broken()) is not None:
                raise broken
        except PeerLostError as error:  # also of a store that is gone
            self._break(error)
        finally:
            self.lock.release()

    def look_for_deaths(self) -> None:
        """Break the group if a rank that this one waits for has ended.

        Called in waits for results that need data from all ranks. Backends usually report a death
        sooner. Gloo, however, loses a send in progress when the connection ends and then waits for
        the group's timeout (one death in a thousand with 3 ranks).
        """
        now = time.monotonic()
        if self._channel is None or now < self._next_look or not self.lock.acquire(blocking=False):
            return
        try:
            self._next_look = now + LIVENESS_SECONDS
            own = self.group.rank()
            dead = self._channel.dead([r for r in range(self.group.size()) if r != own])
            # Require two checks: data that a rank sent before it ended may still be arriving.
            if lost := [rank for rank in dead if rank in self._seen_dead]:
                raise PeerLostError(f"ranks {lost} ended while this rank waited for them")
            self._seen_dead = dead
        except PeerLostError as error:
            self._break(error)
        finally:
            self.lock.release()

    def give_up(self, error: DistributedError, cause: BaseException | None) -> NoReturn:
        """Break the group after a failure of the group itself, and raise the error."""
        self._break(error)
        self.deferred = None
        self.participants.reset()
        raise error from cause

    def _break(self, error: DistributedError) -> None:
        record_error(error)
        self.broken, self.deferred = f"the group failed earlier: {error}", error
        self._round = None
        if self._channel is not None:
            self._channel.report_broken(str(error))
