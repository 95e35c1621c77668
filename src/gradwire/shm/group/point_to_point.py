"""Point-to-point operations of a group."""

# torch's stubs give overloads and names that its own callers do not use on a backend
# mypy: disable-error-code="override,assignment"

from __future__ import annotations

import time
import weakref
from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed import Work

from gradwire._processes import Deadline
from gradwire.errors import ArgumentError, CollectiveTimeoutError
from gradwire.recorder import record_completion, ring
from gradwire.shm.group.group_base import GroupBase
from gradwire.shm.meeting.links import Links
from gradwire.shm.memory.header import NUMBERS
from gradwire.shm.memory.tensors import check_results, check_tensors, flat_of, is_ordinary, only
from gradwire.shm.messages.incoming import Incoming
from gradwire.shm.messages.mailbox import Mailbox, PostedReceive
from gradwire.shm.runtime.work import ShmWork, ended, wait_until


class PointToPoint(GroupBase):
    """Operations of a group that send and receive."""

    def send(self, tensors: list[Tensor], dst: int, tag: int = 0) -> Work:
        """Send a tensor, which can be changed as soon as this returns."""
        self.check_usable()
        self._check_peer(dst, "dst")
        _check_tag(tag)
        tensor = data = only(tensors)
        if not (is_ordinary(tensor) and tensor.dtype in NUMBERS):
            check_tensors(tensors)
            data = flat_of(tensor)
        # before the message is sent: a dump then names a send that hangs
        ring.begin_message(self._recorded, "send", tensor, dst, _ended)
        self._mailbox.last_post = 0.0
        self._outgoing[dst].send(tag, data, Deadline(self._seconds))
        return ended(tensors)

    def recv(self, tensors: list[Tensor], src: int, tag: int = 0) -> Work:
        """Fill a tensor with the next message of this tag from rank `src`."""
        self._check_peer(src, "src")
        return self._receive(tensors, src, tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> Work:
        """Fill a tensor with the next message of this tag from any rank."""
        return self._receive(tensors, None, tag)

    def _receive(self, tensors: list[Tensor], src: int | None, tag: int) -> Work:
        self.check_usable()
        _check_tag(tag)
        tensor, peer = only(tensors), -1 if src is None else src
        is_plain = is_ordinary(tensor) and tensor.dtype in NUMBERS
        if not is_plain:
            check_results(tensors)
        entry = ring.begin_message(self._recorded, "recv", tensor, peer, _ended)
        if src is not None and is_plain and self._incoming[src].take_now(tensor, tag):
            return ended(tensors, src)
        links, mailbox = self._state.links, self._mailbox
        senders = list(self._incoming.values()) if src is None else [self._incoming[src]]
        work = _ReceiveWork(tensors, self._seconds, links, mailbox, senders, tag)
        if entry is not None:
            record_completion(entry, _is_done(weakref.ref(work)))
        receive = PostedReceive(src, tag, tensor.detach(), work)
        with links.lock:
            envelope = mailbox.post(receive)
        mailbox.last_post = work._posted
        if envelope is not None:
            receive.complete(envelope)
        elif links.aborted is not None:  # by another thread, after the check above
            with links.lock:
                mailbox.fail_all(links.aborted)
        elif links.lost:  # receives posted before have failed already
            for sender in senders:  # not over `lost`: the links' thread may add to it
                sender.poll()
        if src is None and not work.is_done():
            work.want()
        return work


def _ended() -> bool:
    """Return True: a sent tensor can be changed at once."""
    return True


class _ReceiveWork(ShmWork):
    """Handle of a receive; a thread that waits, or asks, takes the message from the ring."""

    _wanted = False  # whether the senders were asked to wake this rank

    def __init__(
        self,
        tensors: list[Tensor],
        seconds: float,
        links: Links,
        mailbox: Mailbox,
        senders: list[Incoming],
        tag: int,
    ) -> None:
        super().__init__(tensors, seconds, callbacks_in_own_thread=True)
        self._links, self._mailbox = links, mailbox
        self._senders, self._tag = senders, tag
        self._posted = time.monotonic()

    def _wait(self, seconds: float | None) -> bool:
        if len(self._senders) != 1:
            return wait_until(self.is_completed, seconds)
        self._senders[0].note_wait(self._posted)
        self._senders[0].wait(self, self._tag, Deadline(seconds))
        return self.is_completed()  # messages that have arrived count even after the deadline

    def _give_up(self, error: CollectiveTimeoutError) -> None:
        with self._links.lock:
            cancelled = self._mailbox.cancel(self)
        if cancelled:  # for good: another wait and the future raise the error as well
            self.finish(error)
        else:  # the message is arriving: the tensor is being written
            for sender in self._senders:
                sender.abandon(self)
            self.wait_until_done()

    def is_completed(self) -> bool:
        """Return True if it is done, with or without an error; polls for messages."""
        if not self._done:
            for sender in self._senders:
                sender.poll()
        return self._done

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """Return a future of the tensors."""
        future = super().get_future()
        if not self._done:
            self.want()
        return future

    def want(self) -> None:
        """Complete as soon as the message arrives, even if no thread waits or asks."""
        self._wanted = True
        for sender in self._senders:
            sender.want(self)
        if self._done:  # meanwhile
            self._forget()

    def finish(self, error: BaseException | None = None, source: int = -1) -> None:
        """Mark the receive as done; `source` is the sender's rank."""
        super().finish(error, source)
        if self._wanted:
            self._forget()

    def _forget(self) -> None:
        for sender in self._senders:
            sender.unwant(self)


def _is_done(reference: weakref.ref[_ReceiveWork]) -> Callable[[], bool]:
    """Return a function that tells the recorder if a receive has ended, without its tensors."""

    def done() -> bool:
        work = reference()
        return work is None or work.is_done()

    return done


def _check_tag(tag: int) -> None:
    if not isinstance(tag, int) or not -(2**31) <= tag < 2**31:
        raise ArgumentError(f"tag is {tag!r}: give an int of 32 bits")
