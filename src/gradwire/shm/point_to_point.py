"""A group's point-to-point operations."""

# torch's stubs give overloads and names that its own callers do not use on a backend
# mypy: disable-error-code="override,assignment"

from __future__ import annotations

import time
import weakref
from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed import Work

from gradwire.errors import ArgumentError, CollectiveTimeoutError
from gradwire.recorder import DONE, ring
from gradwire.shm.group_base import GroupBase
from gradwire.shm.header import NUMBERS
from gradwire.shm.incoming import Incoming
from gradwire.shm.links import Links
from gradwire.shm.mailbox import Mailbox, PostedReceive
from gradwire.shm.sync import Deadline
from gradwire.shm.tensors import check_results, check_tensors, flat_of, is_ordinary, only
from gradwire.shm.work import ShmWork, ended, wait_until


class PointToPoint(GroupBase):
    """The part of a group that sends and receives."""

    def send(self, tensors: list[Tensor], dst: int, tag: int = 0) -> Work:
        """Send a tensor; it can be changed at once."""
        self.check_usable()
        self._check_peer(dst, "dst")
        _check_tag(tag)
        tensor = data = only(tensors)
        if not (is_ordinary(tensor) and tensor.dtype in NUMBERS):
            check_tensors(tensors)
            data = flat_of(tensor)
        # before it is sent: a dump names it if it waits
        ring.begin_message(self._recorded, "send", tensor, dst, _ended)
        self._mailbox.last_post = 0.0
        self._outgoing[dst].send(tag, data, Deadline(self._seconds))
        return ended(tensors)

    def recv(self, tensors: list[Tensor], src: int, tag: int = 0) -> Work:
        """Fill a tensor with the next that rank `src` sends with this tag."""
        self._check_peer(src, "src")
        return self._receive(tensors, src, tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> Work:
        """Fill a tensor with the next that any rank sends with this tag."""
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
            entry[DONE] = _is_done(weakref.ref(work))
        receive = PostedReceive(src, tag, tensor.detach(), work)
        with links.lock:
            envelope = mailbox.post(receive)
        mailbox.last_post = work._posted
        if envelope is not None:
            receive.complete(envelope)
        elif links.aborted is not None:  # by another thread, after the check above
            with links.lock:
                mailbox.fail_all(links.aborted)
        elif links.lost:  # which the others have been told of already
            for sender in senders:  # not over `lost`, which the links' thread may add to meanwhile
                sender.look()
        if src is None and not work.is_done():
            work.be_told()
        return work


def _ended() -> bool:
    """What is sent can be changed at once."""
    return True


class _ReceiveWork(ShmWork):
    """The handle of a receive; who waits for it, or asks, takes the message from the ring."""

    _told = False  # whether the senders are asked to wake this rank

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
        return self.is_completed()  # what has arrived counts, though the time is over

    def _give_up(self, error: CollectiveTimeoutError) -> None:
        with self._links.lock:
            cancelled = self._mailbox.cancel(self)
        if cancelled:  # for good: another wait for it, and its future, raise the error, too
            self.finish(error)
        else:  # the message is arriving: the tensor is being written
            for sender in self._senders:
                sender.abandon(self)
            self.wait_until_done()

    def is_completed(self) -> bool:
        """Whether it is done, with or without an error; looks for what has arrived."""
        if not self._done:
            for sender in self._senders:
                sender.look()
        return self._done

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """A future of the tensors."""
        future = super().get_future()
        if not self._done:
            self.be_told()
        return future

    def be_told(self) -> None:
        """Be done as soon as the message arrives, though nobody waits or asks."""
        self._told = True
        for sender in self._senders:
            sender.want(self)
        if self._done:  # meanwhile
            self._forget()

    def finish(self, error: BaseException | None = None, source: int = -1) -> None:
        """Mark it as done; `source` is the rank that the tensor came from."""
        super().finish(error, source)
        if self._told:
            self._forget()

    def _forget(self) -> None:
        for sender in self._senders:
            sender.unwant(self)


def _is_done(reference: weakref.ref[_ReceiveWork]) -> Callable[[], bool]:
    """Whether a receive has ended, for the recorder, which does not keep its tensors."""

    def done() -> bool:
        work = reference()
        return work is None or work.is_done()

    return done


def _check_tag(tag: int) -> None:
    if not isinstance(tag, int) or not -(2**31) <= tag < 2**31:
        raise ArgumentError(f"tag is {tag!r}: give an int of 32 bits")
