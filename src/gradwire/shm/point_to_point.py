"""A group's point-to-point operations."""

# torch's stubs give overloads and names that its own callers do not use on a backend
# mypy: disable-error-code="override,assignment"

from __future__ import annotations

import weakref
from collections.abc import Callable

from torch import Tensor
from torch.distributed import Work

from gradwire.errors import ArgumentError
from gradwire.recorder import ring
from gradwire.shm.group_base import GroupBase
from gradwire.shm.incoming import Incoming
from gradwire.shm.mailbox import PostedReceive
from gradwire.shm.sync import Deadline
from gradwire.shm.tensors import check_results, check_tensors, flat_of, only
from gradwire.shm.work import ShmWork, ended

__all__ = ["PointToPoint"]


class PointToPoint(GroupBase):
    """The part of a group that sends and receives."""

    def send(self, tensors: list[Tensor], dst: int, tag: int = 0) -> Work:
        """Send a tensor; it can be changed at once."""
        self._check_usable()
        self._check_peer(dst, "dst")
        _check_tag(tag)
        check_tensors(tensors)
        ring.begin_message(self._recorded, "send", tensors, dst, lambda: True)
        deadline = Deadline(self._timeout.total_seconds())
        self._outgoing[dst].send(tag, flat_of(only(tensors)), deadline)
        return ended(tensors)

    def recv(self, tensors: list[Tensor], src: int, tag: int = 0) -> Work:
        """Fill a tensor with the next that rank `src` sends with this tag."""
        self._check_peer(src, "src")
        return self._receive(tensors, src, tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> Work:
        """Fill a tensor with the next that any rank sends with this tag."""
        return self._receive(tensors, None, tag)

    def _receive(self, tensors: list[Tensor], src: int | None, tag: int) -> Work:
        self._check_usable()
        _check_tag(tag)
        check_results(tensors)
        links, mailbox = self._state.links, self._mailbox
        incoming = None if src is None else self._incoming[src]
        senders = list(self._incoming.values()) if incoming is None else [incoming]

        def cancel() -> None:
            with links.lock:
                cancelled = mailbox.cancel(work)
            if not cancelled:  # the message is arriving: the tensor is being written
                for sender in senders:
                    sender.abandon(work)
                work.wait_until_done()

        work = _ReceiveWork(tensors, self._timeout.total_seconds(), cancel, incoming)
        done = _is_done(weakref.ref(work))
        ring.begin_message(self._recorded, "recv", tensors, -1 if src is None else src, done)
        receive = PostedReceive(src, tag, only(tensors).detach(), work)
        with links.lock:
            envelope = mailbox.post(receive)
        if envelope is not None:
            receive.complete(envelope)
        elif links.aborted is not None:  # by another thread, after the check above
            with links.lock:
                mailbox.fail_all(links.aborted)
        elif links.lost:  # which the others have been told of already
            for sender in senders:  # not over `lost`, which the links' thread may add to meanwhile
                sender.look()
        return work


class _ReceiveWork(ShmWork):
    """The handle of a receive, whose waiting thread takes the message from the ring itself."""

    def __init__(
        self,
        tensors: list[Tensor],
        seconds: float,
        cancel: Callable[[], None],
        incoming: Incoming | None,
    ) -> None:
        super().__init__(tensors, seconds, cancel, callbacks_in_own_thread=True)
        self._incoming = incoming

    def _wait(self, seconds: float | None) -> bool:
        if self._incoming is None:
            return super()._wait(seconds)
        self._incoming.wait(self.is_completed, Deadline(seconds))
        return self.is_completed()


def _is_done(reference: weakref.ref[_ReceiveWork]) -> Callable[[], bool]:
    """Whether a receive has ended, for the recorder, which does not keep its tensors."""

    def done() -> bool:
        work = reference()
        return work is None or work.is_completed()

    return done


def _check_tag(tag: int) -> None:
    if not isinstance(tag, int) or not -(2**31) <= tag < 2**31:
        raise ArgumentError(f"tag is {tag!r}: give an int of 32 bits")
