"""One group's log, error channel and rounds of resynchronization, on this rank."""

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
from gradwire.ddp.faults.collective_log import CollectiveLog, Entry
from gradwire.ddp.faults.error_channel import ErrorChannel
from gradwire.ddp.faults.participants import Participants
from gradwire.ddp.faults.protocol import Statement
from gradwire.ddp.faults.resynchronization_round import ResynchronizationRound
from gradwire.ddp.faults.waiting import work_in_flight
from gradwire.ddp.group import broadcast_options, message_device, timeout_of
from gradwire.errors import BrokenGroupError, DistributedError, PeerFailedError, PeerLostError
from gradwire.recorder import failed

__all__ = ["UNDECIDED_TEXT", "Resynchronizer"]

TOKEN_BYTES = 16
LIVENESS_SECONDS = 1.0
"""Interval of looking up whether ranks that this rank waits for still run."""
EXCHANGE_SECONDS, EXCHANGE_POLL_SECONDS = 5.0, 2e-3
_NO_STORE = (
    "the process group has no store, through which ranks report errors: if one rank fails, the "
    "others wait until their timeout. Make the group with init_process_group or new_group"
)
UNDECIDED_TEXT = (
    "backward was interrupted by an exception after its last message: ranks that reduced gradients "
    "in that step have taken a step that this rank has not; give all ranks the same parameters"
)


class Resynchronizer:
    """Begins rounds, advances them, and keeps what came of the last one.

    Args:
        group: The group.

    Attributes:
        participants: The group's reducers on this rank.
        lock: Held while anything is sent, so that the order is one, and the position stands still
            while it is stated.
        log: What was sent.
        seconds: The group's timeout.
        positions: Each rank's position, as stated in the last round.
        diverged: The message for ranks that did not take the step which others took in the last
            round; empty if there are none.
        deferred: An error that this rank learnt of and has yet to raise.
        broken: Why the group cannot be used again, if so.
        has_store: False for a group without a store, as groups written in Python may be: an error
            on one rank then breaks the group there.
        name: Random name of the group that all its ranks have; empty before `connect`.
        hook_future: What the hook that was called last returned, if it may send more in callbacks:
            nothing else is sent on the group before it is done.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self.has_store = find_store(group) is not None
        if not self.has_store:
            warnings.warn(_NO_STORE, stacklevel=4)
        self._group = weakref.ref(group)  # the group keeps its domain, not the other way round
        self.participants = Participants()
        self._channel: ErrorChannel | None = None
        self._token: tuple[Tensor, Work] | None = None
        self._round: ResynchronizationRound | None = None
        self._works: list[Work] = []
        self._next_look, self._seen_dead = 0.0, list[int]()
        self.name = "" if self.has_store else "no store"
        self.lock = threading.RLock()
        self.log = CollectiveLog()
        self.seconds = timeout_of(group)
        self.positions: list[int] = []
        self.diverged = ""
        self.deferred: DistributedError | None = None
        self.broken: str | None = None
        self.hook_future: torch._C.Future[Any] | None = None

    @property
    def group(self) -> ProcessGroup:
        """The group."""
        group = self._group()
        assert group is not None
        return group

    @property
    def orphaned(self) -> bool:
        """Whether the group is gone: destroyed, and held by nobody."""
        return self._group() is None

    @property
    def running(self) -> bool:
        """Whether a round has begun and is not over."""
        return self._round is not None

    def position(self) -> int:
        """The number of the last collective that this rank sent."""
        return self.log.position(self.group)

    def counts(self) -> tuple[int, int]:
        """As `position`, and how many logged collectives it sent on other groups."""
        return self.position(), sum(map(len, self.log.elsewhere.values()))

    def sent(self, entry: Entry, work: Work | None = None) -> None:
        """Log a collective that has just been sent; `work` if no participant keeps it."""
        self.log.add(self.group, entry)
        if work is not None:
            self._works.append(work)

    def committed(self, end: int) -> None:
        """All ranks have sent the collective of this number."""
        self.log.forget(end)
        self._works.clear()

    def connect(self) -> None:
        """Make the group's channel, under a random name that rank 0 broadcasts.

        The first collective of every rank on the group, once for all reducers: where ranks verify
        the first model, or else in its first backward. A later call returns at once. A name that is
        counted (groups, wrappers) would differ on a rank that makes one more, such as a copy of the
        model on rank 0.

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
        """Send the first message of `connect`, which waits for it."""
        if (
            self.name or self._token is not None or not self.has_store
        ):  # an exception may have ended the wait for it
            return
        group = self.group
        mine = torch.frombuffer(bytearray(os.urandom(TOKEN_BYTES)), dtype=torch.uint8)
        token = mine.to(message_device(group))
        self._token = token, group.broadcast([token], broadcast_options(0))

    def exchange(self, topic: str, value: Any) -> list[Any] | None:
        """Return every rank's value, through the store; None if not all come in a few seconds.

        Used for the text of errors that all ranks raise, while collectives may be in progress.
        Without a store, return None.
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
        """Begin a round with this rank's error; False if one has begun already, without it.

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
        """From here on this rank sends nothing but the collectives that others wait in."""
        assert self._channel is not None
        group, log = self.group, self.log
        elsewhere = {
            name: (max(number for number, _ in sent), sent) for name, sent in log.elsewhere.items()
        }
        undecided = max(self.participants.undecided(), default=None)
        statement = Statement(error, self.position(), list(log.sent), elsewhere, undecided)
        in_flight = self.participants.in_flight()
        in_flight += [work_in_flight(work) for work in (*log.works, *self._works)]
        return ResynchronizationRound(group, self._channel, log, statement, in_flight, self.seconds)

    def advance(self) -> bool:
        """Go on as far as is possible without waiting; whether there is more to do.

        Begins a round if another rank has reported an error. What goes wrong breaks the group.
        """
        group = self._group()
        # no store: the group was destroyed, though something may refer to it
        if group is None or find_store(group) is None:
            return False
        if self._channel is None or self.broken is not None:
            return False
        # Not blocking: a thread polls all groups while it holds the lock of one. Two threads that
        # waited for each other's lock would deadlock; the other one advances this round.
        if not self.lock.acquire(blocking=False):
            return self._round is not None
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

    def _end_round(self, done: ResynchronizationRound) -> None:
        assert self._channel is not None
        self._channel.next_round()
        self._round, self.positions, self.diverged = None, done.positions, ""
        if done.diverged:
            self.diverged = f"ranks {done.diverged}: {UNDECIDED_TEXT}"
        self.log.clear()
        self._works.clear()
        self.hook_future = None
        if done.broken is not None:
            self.broken, self.deferred = str(done.broken), done.broken
        elif done.own is None:
            errors = "; ".join(f"rank {rank}: {text}" for rank, text in done.failures.items())
            self.deferred = PeerFailedError(
                f"gradients were not reduced, because of an error elsewhere. {errors}"
            )
            failed(self.deferred)

    def hear_of_loss(self) -> None:
        """Break the group if another rank has reported that it failed."""
        if self._channel is None or not self.lock.acquire(blocking=False):
            return
        try:
            if (lost := self._channel.lost()) is not None:
                raise lost
        except PeerLostError as error:  # also of a store that is gone
            self._break(error)
        finally:
            self.lock.release()

    def look_for_deaths(self) -> None:
        """Break the group if a rank that this one waits for has ended.

        To be called in waits for what no rank has before all have given theirs. Backends tell of
        deaths, and sooner; but Gloo forgets a send that it has begun when the connection ends, and
        waits for the group's timeout (one death in a thousand, W = 3).
        """
        now = time.monotonic()
        if self._channel is None or now < self._next_look or not self.lock.acquire(blocking=False):
            return
        try:
            self._next_look = now + LIVENESS_SECONDS
            own = self.group.rank()
            dead = self._channel.dead([r for r in range(self.group.size()) if r != own])
            # seen twice: what it sent before it ended may still be on its way
            if lost := [rank for rank in dead if rank in self._seen_dead]:
                raise PeerLostError(f"ranks {lost} ended while this rank waited for them")
            self._seen_dead = dead
        except PeerLostError as error:
            self._break(error)
        finally:
            self.lock.release()

    def give_up(self, error: DistributedError, cause: BaseException | None) -> NoReturn:
        """The group itself failed: there is nothing to resynchronize over. Raises the error."""
        self._break(error)
        self.deferred = None
        self.participants.reset()
        raise error from cause

    def _break(self, error: DistributedError) -> None:
        failed(error)
        self.broken, self.deferred = f"the group failed earlier: {error}", error
        self._round = None
        if self._channel is not None:
            self._channel.report_lost(str(error))
